"""The ranks as one group: joining it, adding numbers over it, and failing together.

    group = join(info, settings.backend, device)
    with together(info.node):              # raises on every rank what any rank raised, the same line
        open_data(settings)
    loss, samples = sum_over_ranks([12.5, 32.0])

Small talk (this file) goes over Gloo between CPUs, whatever carries the gradients: it needs no GPU and waits for none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer import nccl
from trainer.env import RankInfo
from trainer.own_gpu import own_gpu_first
from trainer.shared.config import Settings
from trainer.shared.errors import TrainError
from trainer.shared.shares import Speed, at_most, parse_speeds, split_batch, without_absent
from trainer.timing import Timer

TIMEOUT = timedelta(minutes=10)  # long enough for one host to fetch and unpack a data set while the others wait
_LINE_BYTES = 1000


def choose_device(wanted: str, backend: str, info: RankInfo) -> torch.device:
    """The rank's device. Raises TrainError for a GPU that is not there."""
    is_first = wanted != "cpu" and backend == "gloo" and own_gpu_first(info.local_rank)
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise TrainError(f"{info.node}: no GPU is visible to torch {torch.__version__} ({built}); use device=cpu")
    if info.local_rank >= gpus and backend == "nccl":
        raise TrainError(
            f"{info.node}: local rank {info.local_rank} has no GPU of its own ({gpus} visible) and nccl cannot "
            "share one; start fewer ranks, or use backend=gloo"
        )
    device = torch.device("cuda", 0 if is_first else info.local_rank % gpus)
    torch.cuda.set_device(device)
    return device


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
    return dist.group.WORLD


def _nccl_group(info: RankInfo, device: torch.device) -> dist.ProcessGroup:
    """Raises TrainError, the same on every rank, where NCCL differs among them or does not get through."""
    if wrong := nccl.unlike(gather_lines(f"{nccl.version()} {info.node}")):
        raise TrainError(wrong)
    group = dist.new_group(backend="nccl", timeout=TIMEOUT)
    if info.world_size > 1:
        ended = nccl.first_sum(group, device, nccl.patience_s(info.world_size))
        if wrong := nccl.stuck(gather_lines(nccl.rank_line(ended, info.local_world_size, info.node))):
            raise TrainError(wrong)
    return group


def _store(info: RankInfo) -> dist.Store:
    """Where the ranks tell each other their addresses. A torchrun that starts all of one host's ranks anew keeps its
    store, and those of the ranks that died are still in it: each start has a part of its own.
    """
    store, _, _ = next(dist.rendezvous("env://", info.rank, info.world_size, timeout=TIMEOUT))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(restarts, store) if info.local_world_size == info.world_size else store


def leave() -> None:
    """The orderly end: no rank closes its connections while another still needs them."""
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def together(node: str) -> Iterator[None]:
    """Waits for every rank at its end; a TrainError of one rank is raised on every rank, the lowest rank's first.

    node: put before the line, since the others cannot know on which host it failed.
    """
    own = ""
    try:
        yield
    except TrainError as error:
        own = f"{node}: {error}"
    for line in gather_lines(own):
        if line:
            raise TrainError(line)


def gather_lines(own: str) -> list[str]:
    """Each rank's line, in the order of ranks; what goes beyond 1,000 bytes is cut off."""
    mine = torch.tensor(list(own.encode()[:_LINE_BYTES].ljust(_LINE_BYTES, b"\0")), dtype=torch.uint8)
    lines = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(lines, mine)
    return [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in lines]


def shares_of_ranks(settings: Settings, info: RankInfo) -> tuple[tuple[int, ...], list[Speed | None]]:
    """Samples of a full batch for each rank, and what is known of its speed.

    Raises TrainError where the setting does not fit the ranks there are.
    """
    names = [line.rpartition(":") for line in gather_lines(f"{info.node}:{info.local_rank}")]
    ranks = [(node, int(local_rank)) for node, _, local_rank in names]
    speeds = {rank: at_most(speed, settings.local_batch) for rank, speed in parse_speeds(settings.speeds).items()}
    # In an elastic job, which alone sets this variable, a node that is spoken of may have been lost.
    wanted = without_absent(settings.shares, ranks) if "ORCH_RESTARTED" in os.environ else settings.shares
    try:
        shares = split_batch(wanted, speeds, ranks, settings.batch)
    except ValueError as error:
        raise TrainError(f"shares: {error}") from error
    return shares, [speeds.get(rank) for rank in ranks]


def agreed(values: list[float], how: dist.ReduceOp) -> list[float]:
    """The least, largest or sum over all ranks, value by value, in double precision."""
    told = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(told, op=how)
    return told.tolist()


def sum_over_ranks(values: list[float]) -> list[float]:
    return agreed(values, dist.ReduceOp.SUM)


def timed_together(timer: Timer, work: Callable[[], object]) -> float:
    """Seconds of this rank's work, which all ranks begin at once."""
    timer.wait()
    dist.barrier()  # over Gloo, between the hosts' programs
    begin = timer.mark()
    work()
    end = timer.mark()
    timer.wait()
    return timer.ms(begin, end) / 1000


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [error.__class__.__name__])[0][:300]
