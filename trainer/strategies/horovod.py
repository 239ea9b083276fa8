"""`horovod`: sums gradients during backward with Horovod (Sergeev and Del Balso 2018).

Works without `horovodrun`: ranks get their numbers from us and exchange addresses through torch's store.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.timer import InjectedDelay, Timer
from trainer.ranks.process_group import LoopbackStore, before_leaving, served, store_of_all, timeout
from trainer.shared.errors import TrainError
from trainer.strategies.base import Base, Exchange, refuse_unused, share_initial_state, weighted

_meetings: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
"""Earlier meetings of these ranks, whose addresses are still in the store."""


class Horovod(Base):
    """nodes: each rank's host.

    Raises TrainError if the package is missing or unsuitable, or ranks cannot connect.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, timer: Timer, delay: InjectedDelay, nodes: Sequence[str]
    ) -> None:
        self.model, self.timer, self.delay = model, timer, delay
        self.on_its_way: list[tuple[Any, Tensor, Tensor]] = []
        self.is_last = True
        self.hvd = package(next(model.parameters()).device)
        connect(self.hvd, group, nodes or [str(rank) for rank in range(group.size())])
        share_initial_state(model, group)
        self.origins = [self._watch(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]

    def _watch(self, name: str, weight: Tensor) -> Any:
        """The node where autograd adds up the weight's gradient; it must be kept alive."""
        # A weak reference, because Python's collector cannot see torch's hooks.
        with torch.enable_grad():
            used: Any = weight.expand_as(weight)
        origin = used.grad_fn.next_functions[0][0]
        origin.register_hook(partial(Horovod._send, weakref.proxy(self), name, weight))
        return origin

    def _send(self, name: str, weight: Tensor, *_: object) -> None:
        if not self.is_last or weight.grad is None:
            return
        self.delay.pause("call")
        sent = weight.grad.contiguous()  # required by Horovod
        self.on_its_way.append((self.hvd.allreduce_async_(sent, name=name, op=self.hvd.Sum), sent, weight.grad))

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        weighted(loss_sum, batch).backward()
        if len(self.on_its_way) < len(self.origins):
            refuse_unused(self.model, loss_sum)
        self.delay.pause("sync")
        computed = self.timer.mark()
        for handle, sent, gradient in self.on_its_way:
            self.hvd.synchronize(handle)
            if sent is not gradient:
                gradient.copy_(sent)
        self.on_its_way.clear()
        return Exchange(computed)

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        self.is_last = False
        yield
        self.is_last = True

    def whole(self) -> nn.Module:
        return self.model


def package(device: torch.device, *, between_hosts: bool = False) -> Any:
    """`horovod.torch`. Raises TrainError if it cannot be used here."""
    try:
        import horovod.torch as hvd
    except (ImportError, OSError) as error:
        found = (str(error).splitlines() or [""])[0][:200]
        raise TrainError(
            f"strategy horovod: the package horovod cannot be imported ({found}): build it for torch "
            f"{torch.__version__} (`orch help frameworks`, Horovod), or use strategy=ddp"
        ) from error
    if not hasattr(hvd, "init") or not hvd.gloo_built():
        raise TrainError(
            "strategy horovod: the package horovod was built without PyTorch or Gloo: build it again with "
            "HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1, or use strategy=ddp"
        )
    if device.type == "cuda" and not hvd.nccl_built():
        raise TrainError(
            "strategy horovod: the package horovod was built without NCCL, and this rank is on a GPU: build it again "
            "with HOROVOD_GPU_OPERATIONS=NCCL, or use device=cpu or strategy=ddp"
        )
    if between_hosts and not heeds_interface():
        raise TrainError(
            "strategy horovod: this build of horovod listens where a host's own name leads, whatever the training "
            "address: build it as `orch help frameworks` describes, or use strategy=ddp"
        )
    return hvd


def heeds_interface() -> bool:
    """Whether all connections use the interface HOROVOD_GLOO_IFACE."""
    # In 0.28.1 as published, those with gradients do not, and no connection is authenticated. Our build's version has a
    # mark.
    try:
        return metadata.version("horovod").endswith("+iface")
    except metadata.PackageNotFoundError:
        return False


def connect(hvd: Any, group: dist.ProcessGroup, nodes: Sequence[str]) -> None:
    """Connects the group's ranks. Raises TrainError."""
    if hvd.is_initialized():  # of another group
        hvd.shutdown()
    ranks = tuple(dist.get_global_rank(group, rank) for rank in range(group.size()))
    scope = f"horovod/{'-'.join(map(str, ranks))}/{next(_meetings[ranks])}"
    with served(dist.PrefixStore(scope, store_of_all())) as server:
        os.environ.update(variables(group.rank(), nodes, server))
        try:
            hvd.init()
        except (RuntimeError, ValueError) as error:
            raise TrainError(
                f"{nodes[group.rank()]}: rank {group.rank()} cannot meet {group.size()} ranks through Horovod "
                f"({(str(error).splitlines() or [''])[0][:200]}): see its lines above; or try strategy=ddp"
            ) from error
    before_leaving("horovod", hvd.shutdown)


def variables(rank: int, nodes: Sequence[str], server: LoopbackStore) -> dict[str, str]:
    """horovodrun's variables. nodes: each rank's host."""
    local_ranks = [nodes[:each].count(node) for each, node in enumerate(nodes)]
    across = [each for each, local in enumerate(local_ranks) if local == local_ranks[rank]]
    numbers = {
        "RANK": rank,
        "SIZE": len(nodes),
        "LOCAL_RANK": local_ranks[rank],
        "LOCAL_SIZE": nodes.count(nodes[rank]),
        "CROSS_RANK": across.index(rank),
        "CROSS_SIZE": len(across),
        "HOSTNAME": f"host{nodes.index(nodes[rank])}",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": server.address,
        "GLOO_RENDEZVOUS_PORT": server.port,
        "GLOO_IFACE": os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0],
        "GLOO_TIMEOUT_SECONDS": round(timeout().total_seconds()),
    }
    return {f"HOROVOD_{name}": str(value) for name, value in numbers.items()}
