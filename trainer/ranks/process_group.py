"""The ranks as one group, which each joins when it starts and leaves when all are done.

group = join(info, settings.backend, device)       the group that gradients travel in, by NCCL or Gloo
before_leaving("horovod", hvd.shutdown)            for what else has ranks meet
leave()
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainer.ranks import nccl
from trainer.ranks.agreement import gather_lines, sum_over_ranks, together
from trainer.ranks.rank_info import RankInfo
from trainer.shared.errors import TrainError

TIMEOUT = timedelta(minutes=10)  # long enough for one host to fetch and unpack a data set while the others wait
_partings: dict[str, Callable[[], object]] = {}


def join(info: RankInfo, backend: str, device: torch.device) -> dist.ProcessGroup:
    """Joins the other ranks; gives the group that gradients travel in. Raises TrainError when they cannot be met."""
    try:
        if info.master is None:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(
                "gloo", store=_store(info), timeout=TIMEOUT, rank=info.rank, world_size=info.world_size
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


def _nccl_group(info: RankInfo, device: torch.device) -> dist.ProcessGroup:
    """Raises TrainError, the same on every rank, where NCCL differs among them or does not get through."""
    if wrong := nccl.unlike(gather_lines(f"{nccl.version()} {info.node}")):
        raise TrainError(wrong)
    group = cast("dist.ProcessGroup", dist.new_group(backend="nccl", timeout=TIMEOUT))
    if info.world_size > 1:
        ended = nccl.first_sum(group, device, nccl.patience_s(info.world_size))
        if wrong := nccl.stuck(gather_lines(nccl.rank_line(ended, info.local_world_size, info.node))):
            raise TrainError(wrong)
    return group


def _store(info: RankInfo) -> dist.Store:
    """Where the ranks exchange their addresses. A torchrun that starts all of one host's ranks again keeps its
    store, and those of the ranks that died are still in it: each start has a part of its own.
    """
    store, _, _ = next(dist.rendezvous("env://", info.rank, info.world_size, timeout=TIMEOUT))
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
