"""The ranks as one group, which each joins when it starts and leaves when all are done.

group = join(info, settings.backend, device)       the group that gradients travel in, by NCCL or Gloo
before_leaving("horovod", hvd.shutdown)            for what else has ranks meet
with for_all_ranks(info, lambda: "an evaluation"): what ends one rank is the reason on all
leave()
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainer.ranks import nccl
from trainer.ranks.agreement import gather_lines, sum_over_ranks, together
from trainer.ranks.rank_info import RankInfo
from trainer.shared.errors import TrainError

_timeouts = [timedelta(minutes=10)]
_REASON = "orch/reason"
BY_ANOTHER = "another rank ended the run"
"""How the reason of another rank begins: `orchestrator/remote/logs.py` takes no such rank for the first cause."""
_TIMED_OUT = ("Timed out waiting", "Timeout waiting", "timed out after")
"""What Gloo, torch's store and NCCL say when nobody came in time."""
_partings: dict[str, Callable[[], object]] = {}


def join(info: RankInfo, backend: str, device: torch.device, timeout_s: float = 600.0) -> dist.ProcessGroup:
    """Joins the other ranks; gives the group that gradients travel in. Raises TrainError when they cannot be met.

    timeout_s: as of the setting; by default long enough for one host to fetch and unpack a data set.
    """
    _timeouts[:] = [timedelta(seconds=timeout_s)]
    try:
        if info.master is None:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(
                "gloo", store=_store(info), timeout=timeout(), rank=info.rank, world_size=info.world_size
            )
    except (RuntimeError, ValueError) as error:
        raise TrainError(
            f"{info.node}: rank {info.rank} cannot join {info.world_size} ranks at {info.master} "
            f"({_first_line(error)}): check that the port is reachable and that every rank was started"
        ) from error
    own_gpu = device.type == "cuda" and info.local_world_size <= torch.cuda.device_count()
    with together(info.node):
        if backend == "nccl" and device.type != "cuda":
            raise TrainError(f"backend nccl needs a GPU, rank {info.rank} is on {device}; use backend=gloo")
        if backend == "nccl" and not dist.is_nccl_available():
            raise TrainError(f"torch {torch.__version__} was built without NCCL; use backend=gloo")
    ranks_with_nccl = sum_over_ranks([float(own_gpu and dist.is_nccl_available())])[0]
    if backend == "nccl" or (backend == "auto" and ranks_with_nccl == info.world_size):
        return _nccl_group(info, device)
    return cast("dist.ProcessGroup", dist.group.WORLD)


def timeout() -> timedelta:
    """How long a rank waits for another in each exchange."""
    return _timeouts[0]


@contextlib.contextmanager
def for_all_ranks(info: RankInfo, doing: Callable[[], str]) -> Iterator[None]:
    """A TrainError of one rank is left for the others, which get no more than a closed connection: they name it.
    doing: for a rank for which nobody came in time.
    """
    try:
        yield
    except TrainError as error:
        with contextlib.suppress(RuntimeError):  # the store may be gone, with the rank that kept it
            store_of_all().set(_reason_key(), str(error)[:1000])
        raise
    except RuntimeError as error:
        if reason := _reason_of_others():
            raise TrainError(f"{BY_ANOTHER}: {reason}") from error
        if not any(words in str(error) for words in _TIMED_OUT):
            raise
        waited_s = timeout().total_seconds()
        line = (
            f"rank {info.rank} on {info.node} waited {waited_s:g} s for another rank in {doing()}: what one rank does "
            "by itself (an evaluation, an upload) has to take less than timeout_s; set a larger one, or do it on all "
            "ranks, like run.evaluate"
        )
        with contextlib.suppress(RuntimeError):
            store_of_all().set(_reason_key(), line)
        raise TrainError(line) from error


def _reason_of_others() -> str:
    with contextlib.suppress(RuntimeError, ValueError):
        store, key = store_of_all(), _reason_key()
        if store.check([key]):
            return store.get(key).decode(errors="replace")[:1000]
    return ""


def _reason_key() -> str:
    """Of this start: ranks that torchrun starts again may find the store of those before."""
    return f"{_REASON}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _nccl_group(info: RankInfo, device: torch.device) -> dist.ProcessGroup:
    """Raises TrainError, the same on every rank, where NCCL differs among them or does not get through."""
    if wrong := nccl.unlike(gather_lines(f"{nccl.version()} {info.node}")):
        raise TrainError(wrong)
    group = cast("dist.ProcessGroup", dist.new_group(backend="nccl", timeout=timeout()))
    if info.world_size > 1:
        ended = nccl.first_sum(group, device, nccl.patience_s(info.world_size))
        if wrong := nccl.stuck(gather_lines(nccl.rank_line(ended, info.local_world_size, info.node))):
            raise TrainError(wrong)
    return group


def _store(info: RankInfo) -> dist.Store:
    """Where the ranks exchange their addresses. A torchrun that starts all of one host's ranks again keeps its
    store, and those of the ranks that died are still in it: each start has a part of its own.
    """
    store, _, _ = next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout()))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(restarts, store) if info.local_world_size == info.world_size else store


def store_of_all() -> dist.Store:
    """The one through which the ranks have met."""
    store: dist.Store = distributed_c10d._get_default_store()
    return store


def before_leaving(name: str, part: Callable[[], object]) -> None:
    """Has `leave` call this, once no rank needs the others any more. A name that is there already gives way."""
    _partings[name] = part


def leave() -> None:
    """The orderly end: no rank closes its connections while another still needs them."""
    dist.barrier()
    for part in _partings.values():
        part()
    dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [error.__class__.__name__])[0][:300]
