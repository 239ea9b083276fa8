"""Sums over all ranks, by the way that costs the slow link least: `sums.sum(tensor)`.

    sums = GradientSum(group, nodes=["a16", "a16", "a2000"], dtype=torch.bfloat16)
    sums.sum(gradient)                       in place, blocking: travels in 16 bits, once between the two hosts
    sums.begin(bucket).wait()                the same beside other work; sums go out in the order in which they began

Every rank has to begin the same sums in the same order.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.compute.brake import NO_BRAKE, Brake
from trainer.compute.executor import ON_DEVICE, Executor
from trainer.shared.errors import TrainError
from trainer.strategies.relay import Relay, pieces_of
from trainer.strategies.staging import Staging

Group = dist.ProcessGroup
Arrived = Callable[[], None]
_UNKNOWN_TYPE = re.compile(
    r"(unsupported|invalid|unconvertible|not support).*type|type.*(unsupported|not support)", re.I | re.S
)
"""What torch says of a kind of number that it cannot add up, and of no broken connection."""
_PIECE = 1 << 22
"""Elements: 16 MiB of float32."""
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class GradientSum:
    """nodes: of each rank its host, where those of one host shall add up among themselves first (Gloo; NCCL finds out
    by itself which ranks share one). dtype: what numbers travel in; None: what they are. brake: holds this rank up
    before each call of a blocking collective, where `slow` says so; held_up_s adds that up. executor: does what is done
    to the numbers before and after they travel. devices: of each rank its kind of device (`cpu`, `cuda`); without them
    all are CPUs.

    Raises TrainError where this torch cannot add up such numbers.
    """

    def __init__(
        self,
        group: Group,
        nodes: Sequence[str] = (),
        dtype: torch.dtype | None = None,
        brake: Brake = NO_BRAKE,
        executor: Executor = ON_DEVICE,
        devices: Sequence[str] = (),
    ) -> None:
        self.group, self.executor = group, executor
        self.dtype = dtype
        self.brake, self.held_up_s = brake, 0.0
        if dtype and not _adds_up(dtype, group):
            name = next(name for name, known in DTYPES.items() if known == dtype)
            other = "fp16" if name == "bf16" else "bf16"
            raise TrainError(f"wire {name}: torch {torch.__version__} cannot add it up; use wire={other}")
        by_nccl, on_gpu = dist.get_backend(group) == "nccl", "cuda" in devices and devices[group.rank()] == "cuda"
        is_shared = 1 < len(set(nodes)) < len(nodes)
        # What all ranks know alike decides: a relay's groups are made by all of them, or by none.
        relays = not by_nccl and (is_shared or dtype is not None or "cuda" in devices)
        self.relay = Relay(group, nodes if is_shared else (), dtype, executor) if relays else None
        self.staging = Staging(self.relay) if self.relay and on_gpu else None
        self.aside = torch.cuda.Stream() if by_nccl else None

    def begin(self, tensor: Tensor, arrived: Arrived = lambda: None) -> Any:
        """A future of the tensor, which by then holds the sum; nobody may touch it before. arrived: called as soon as
        it does, for a mark on the device's own time line.
        """
        if self.aside:
            return self._begin_aside(tensor, arrived, self.aside)
        if self.staging:
            return self.staging.begin(tensor, arrived)
        if self.relay:
            summed = self.relay.begin(tensor)
        else:
            summed = dist.all_reduce(tensor, group=self.group, async_op=True).get_future()
        return summed.then(partial(_finished, tensor=tensor, arrived=arrived))

    def _begin_aside(self, tensor: Tensor, arrived: Arrived, aside: torch.cuda.Stream) -> Any:
        """A stream beside the one that computes waits for NCCL, and whoever waits for the future waits for that one.
        NCCL's own future will not do: in torch 2.15 (ProcessGroupNCCL2) asking for it has the current stream wait, and
        that is backward's.
        """
        sent = self._rounded(tensor)
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[tensor.device])
        with torch.cuda.stream(aside):
            work.wait()
            if sent is not tensor:
                tensor.copy_(sent)
                sent.record_stream(aside)
            arrived()
            future.set_result(tensor)
        return future

    def _rounded(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def begin_in_pieces(self, tensor: Tensor) -> list[Any]:
        """Their futures: every connection has one, and one is rounded while another travels."""
        return [self.begin(piece) for piece in pieces_of(tensor, _PIECE)]

    def sum(self, tensor: Tensor) -> None:
        self.hold_up()
        if self.aside:  # a plain call in the stream that computes: a future costs the host 50 us more
            dist.all_reduce(sent := self._rounded(tensor), group=self.group)
            if sent is not tensor:
                tensor.copy_(sent)
            return
        for piece in self.begin_in_pieces(tensor):
            piece.wait()

    def hold_up(self) -> None:
        """Before each blocking collective of an exchange; `sum` does it by itself."""
        self.held_up_s += self.brake.pause("call")


def _finished(summed: Any, tensor: Tensor, arrived: Arrived) -> Tensor:
    summed.wait()  # raises what went wrong with it
    arrived()
    return tensor


def _adds_up(dtype: torch.dtype, group: Group) -> bool:
    """Gloo says so before it sends anything: on every rank the same. Raises what else goes wrong."""
    try:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        dist.all_reduce(torch.ones(1, dtype=dtype, device=device), group=group)
    except (RuntimeError, TypeError, ValueError) as error:
        if not _UNKNOWN_TYPE.search(str(error)):
            raise
        return False
    return True


_SMALL, _LARGE, _TIMES = 1 << 8, 1 << 20, 5


def fitted_bucket_bytes(sums: GradientSum, gradient_bytes: int, device: torch.device) -> int:
    """The size of bucket with which a gradient's S bytes are through first, by t = alpha + beta * bytes, measured now.

    Beside S * beta, k buckets cost k * alpha, and one bucket's S/k * beta lies before or behind all computing: the sum
    is least for buckets of sqrt(S * alpha / beta) bytes. On every rank the same: the slowest one's, to the next half
    power of two, so that the same link gives the same buckets, and the same order of sums, from run to run.
    """
    small_s, large_s = (_seconds(sums, torch.zeros(elements, device=device)) for elements in (_SMALL, _LARGE))
    beta = max(large_s - small_s, 1e-9) / (4 * (_LARGE - _SMALL))
    fitted = torch.tensor([(gradient_bytes * small_s / beta) ** 0.5], dtype=torch.float64)
    dist.all_reduce(fitted, op=dist.ReduceOp.MAX)
    return int(2 ** (min(max(round(2 * math.log2(max(fitted.item(), 1.0))), 40), 56) / 2))


def _seconds(sums: GradientSum, tensor: Tensor) -> float:
    """The median, which leaves out the first one, with the connecting."""
    taken = []
    for _ in range(_TIMES):
        began_s = time.perf_counter()
        sums.begin(tensor).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)
