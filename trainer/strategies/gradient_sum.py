"""Sums over all ranks: rounded for transfer, within hosts first, through host memory for GPUs with Gloo.

    sums = GradientSum(group, nodes=["a16", "a16", "a2000"], dtype=torch.bfloat16)
    sums.begin(bucket).wait()

Every rank must begin the same sums in the same order.
"""

from __future__ import annotations

import math
import queue
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.compute.buffers import bytes_of
from trainer.compute.compiler import ON_DEVICE, Executor
from trainer.compute.timer import NO_DELAY, InjectedDelay
from trainer.ranks.process_group import timeout
from trainer.shared import gpu_work
from trainer.shared.errors import TrainError
from trainer.strategies.base import first_rank

Group = dist.ProcessGroup
Arrived = Callable[[], None]
_UNKNOWN_TYPE = re.compile(
    r"(unsupported|invalid|unconvertible|not support).*type|type.*(unsupported|not support)", re.I | re.S
)
"""For number types, not for broken connections."""
_PIECE = 1 << 22
"""Elements: 16 MiB of float32."""
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class GradientSum:
    """Raises TrainError if torch cannot add numbers of `dtype`.

    nodes: each rank's host, for sums within hosts first (Gloo; NCCL does so by itself). dtype: for transfers; None:
    keeps the tensor's. delay: delays blocking collectives. executor: runs local arithmetic. devices: each rank's device
    type.
    """

    def __init__(
        self,
        group: Group,
        nodes: Sequence[str] = (),
        dtype: torch.dtype | None = None,
        delay: InjectedDelay = NO_DELAY,
        executor: Executor = ON_DEVICE,
        devices: Sequence[str] = (),
    ) -> None:
        self.group, self.executor = group, executor
        self.dtype = dtype
        self.delay, self.held_up_s = delay, 0.0
        if dtype and not _adds_up(dtype, group):
            name = next(name for name, known in DTYPES.items() if known == dtype)
            other = "fp16" if name == "bf16" else "bf16"
            raise TrainError(f"wire {name}: torch {torch.__version__} cannot add it up; use wire={other}")
        by_nccl, on_gpu = dist.get_backend(group) == "nccl", "cuda" in devices and devices[group.rank()] == "cuda"
        is_shared = 1 < len(set(nodes)) < len(nodes)
        # All ranks must decide alike, since they make a relay's groups together.
        relays = not by_nccl and (is_shared or dtype is not None or "cuda" in devices)
        self.relay = Relay(group, nodes if is_shared else (), dtype, executor) if relays else None
        self.staging = Staging(self.relay) if self.relay and on_gpu else None
        self.aside = torch.cuda.Stream() if by_nccl else None

    def begin(self, tensor: Tensor, arrived: Arrived = lambda: None) -> Any:
        """A future of the sum, in place. arrived: called then, for a mark on the device."""
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
        # A stream waits for NCCL, and the future's users wait for that stream. In torch 2.15 (ProcessGroupNCCL2) NCCL's
        # own future makes the current stream wait, which is backward's.
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
        """One per connection: a piece is rounded while another travels."""
        return [self.begin(piece) for piece in pieces_of(tensor, _PIECE)]

    def sum(self, tensor: Tensor) -> None:
        self.hold_up()
        if self.aside:  # a future costs the host 50 us more
            dist.all_reduce(sent := self._rounded(tensor), group=self.group)
            if sent is not tensor:
                tensor.copy_(sent)
            return
        for piece in self.begin_in_pieces(tensor):
            piece.wait()

    def hold_up(self) -> None:
        """Delays each blocking collective of an exchange; `sum` calls it itself."""
        self.held_up_s += self.delay.pause("call")


def _finished(summed: Any, tensor: Tensor, arrived: Arrived) -> Tensor:
    summed.wait()  # raises its errors
    arrived()
    return tensor


def _adds_up(dtype: torch.dtype, group: Group) -> bool:
    """Equal on all ranks: Gloo raises before it sends anything."""
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
    """The bucket size with the shortest exchange, by t = alpha + beta * bytes, measured now."""
    # Besides S * beta, k buckets cost k * alpha, and one bucket's S/k * beta is not overlapped: sqrt(S * alpha / beta)
    # bytes are best. Rounded to half powers of two, so that a link gives the same buckets, and order of sums, in every
    # run.
    small_s, large_s = (_seconds(sums, torch.zeros(elements, device=device)) for elements in (_SMALL, _LARGE))
    beta = max(large_s - small_s, 1e-9) / (4 * (_LARGE - _SMALL))
    fitted = torch.tensor([(gradient_bytes * small_s / beta) ** 0.5], dtype=torch.float64)
    dist.all_reduce(fitted, op=dist.ReduceOp.MAX)
    return int(2 ** (min(max(round(2 * math.log2(max(fitted.item(), 1.0))), 40), 56) / 2))


def _seconds(sums: GradientSum, tensor: Tensor) -> float:
    # The median ignores the first exchange, which connects.
    taken = []
    for _ in range(_TIMES):
        began_s = time.perf_counter()
        sums.begin(tensor).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


class Staging:
    """Sums a GPU's numbers over Gloo, through pinned host memory. Copies use their own stream."""

    # Gloo takes GPU tensors, but its thread uses the host's first GPU, so the rank's own GPU could not be marked.

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.stream = torch.cuda.Stream()
        self.leaving: queue.SimpleQueue[WaitingTensor] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    def begin(self, tensor: Tensor, arrived: Callable[[], None]) -> Any:
        """arrived: called in the stream of the last copy."""
        computed = torch.cuda.Event(blocking=True)  # waits without using a core
        computed.record()
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[tensor.device])
        self.leaving.put(WaitingTensor(tensor, arrived, computed, future))
        return future

    def _send_all(self) -> None:
        torch.cuda.set_stream(self.stream)  # also sets the device, by default the host's first GPU
        while True:
            parcel = self.leaving.get()
            try:
                summed = self.relay.begin(self._fetched(parcel))
                summed.then(partial(self._deliver, parcel=parcel))
            except Exception as error:  # raised where the sum is awaited
                parcel.future.set_exception(error)

    def _fetched(self, parcel: WaitingTensor) -> Tensor:
        # In the order of elements, which all ranks share, whatever their memory format.
        parcel.computed.synchronize()
        copy = torch.empty(parcel.tensor.shape, dtype=parcel.tensor.dtype, pin_memory=True)
        copy.copy_(parcel.tensor, non_blocking=True)
        self.stream.synchronize()
        return copy

    def _deliver(self, summed: Any, parcel: WaitingTensor) -> None:
        torch.cuda.set_stream(self.stream)
        try:
            parcel.tensor.copy_(summed.wait(), non_blocking=True)
            parcel.arrived()
            parcel.future.set_result(parcel.tensor)
        except Exception as error:
            parcel.future.set_exception(error)


class WaitingTensor(NamedTuple):
    tensor: Tensor
    arrived: Callable[[], None]
    computed: torch.cuda.Event
    """Recorded when `tensor` is ready."""
    future: Any


Leg = Callable[[Tensor], Any]
_MESSAGE = 1 << 18
"""Elements: 1 MiB of float32, the message size of Gloo's rings."""


class Relay:
    """Sums on CPUs in several legs, each with a thread, so that tensors overlap: one travels while the next is rounded.

    nodes: each host adds up its ranks' numbers, one rank per host exchanges the sum and distributes it. dtype: for
    transfers between hosts.
    """

    # With n ranks on h hosts a link carries 2(h-1)/h of the bytes each way instead of a ring's 2(n-1)/n (hierarchical
    # all-reduce, as in Horovod). Small pieces keep links and ranks from being idle at the beginning and end.

    def __init__(self, group: Group, nodes: Sequence[str], dtype: torch.dtype | None, executor: Executor) -> None:
        inside, between = _hosts_first(group, nodes) if nodes else ([], [_sum_of(group)])
        rounding = [partial(_round, dtype=dtype, executor=executor.beside())] if dtype else []
        legs = [
            *(partial(_travel, leg=leg) for leg in inside),
            *rounding,
            *(partial(_travel, leg=leg) for leg in between),
        ]
        self.piece = _MESSAGE * len(set(nodes))
        self.first: queue.SimpleQueue[Any] = queue.SimpleQueue()
        arriving = self.first
        for leg in legs:
            leaving: queue.SimpleQueue[Any] = queue.SimpleQueue()
            threading.Thread(target=_carry, args=(arriving, leg, leaving.put), daemon=True).start()
            arriving = leaving
        deliver = partial(_deliver, executor=executor.beside())
        threading.Thread(target=_carry, args=(arriving, deliver, lambda _: None), daemon=True).start()

    def begin(self, tensor: Tensor) -> Any:
        if not self.piece or tensor.numel() <= self.piece:
            return self._begin(tensor)
        futures = [self._begin(piece) for piece in pieces_of(tensor, self.piece)]
        return torch.futures.collect_all(futures).then(partial(_whole, tensor=tensor))

    def _begin(self, piece: Tensor) -> Any:
        parcel = SumUnderWay(piece, piece, None, torch.futures.Future())
        self.first.put(parcel)
        return parcel.future


class SumUnderWay(NamedTuple):
    """A sum in progress."""

    tensor: Tensor
    """Receives the sum."""
    sent: Tensor
    """The numbers that travel."""
    work: Any
    """Its unfinished leg, or None."""
    future: Any


def pieces_of(tensor: Tensor, elements: int) -> Sequence[Tensor]:
    """Views of up to `elements` each."""
    return tensor.view(-1).split(elements) if tensor.is_contiguous() else (tensor,)


def _whole(pieces: Any, tensor: Tensor) -> Tensor:
    for piece in pieces.value():
        piece.wait()  # raises its errors
    return tensor


def _carry(arriving: Any, leg: Callable[[SumUnderWay], SumUnderWay], hand_on: Callable[[SumUnderWay], None]) -> None:
    while True:
        parcel = arriving.get()
        try:
            if parcel.work:
                parcel.work.wait()
            hand_on(leg(parcel))
        except Exception as error:  # raised where the sum is awaited
            parcel.future.set_exception(error)


def _round(parcel: SumUnderWay, dtype: torch.dtype, executor: Executor) -> SumUnderWay:
    sent = torch.empty_like(parcel.tensor, dtype=dtype)
    executor(gpu_work.cast(bytes_of(parcel.tensor)), lambda: sent.copy_(parcel.tensor))
    return parcel._replace(sent=sent)


def _travel(parcel: SumUnderWay, leg: Leg) -> SumUnderWay:
    return parcel._replace(work=leg(parcel.sent))


def _deliver(parcel: SumUnderWay, executor: Executor) -> SumUnderWay:
    if parcel.sent is not parcel.tensor:
        executor(gpu_work.cast(bytes_of(parcel.tensor)), lambda: parcel.tensor.copy_(parcel.sent))
    parcel.future.set_result(parcel.tensor)
    return parcel


def _sum_of(group: Group) -> Leg:
    # A separate group, independent of the order of other sums.
    own = _own_group([_ranks_of(group)])
    return lambda tensor: dist.all_reduce(tensor, group=own, async_op=True)


def _hosts_first(group: Group, nodes: Sequence[str]) -> tuple[list[Leg], list[Leg]]:
    """The legs to a host's sum, and from there to the sum on all ranks."""
    of_hosts = [[r for r, n in zip(_ranks_of(group), nodes, strict=True) if n == node] for node in dict.fromkeys(nodes)]
    leaders = _own_group([[host[0] for host in of_hosts]])
    inward, outward = _own_group(of_hosts), _own_group(of_hosts)
    inside: list[Leg] = []
    between: list[Leg] = []
    if inward.size() > 1:
        inside.append(lambda tensor: dist.reduce(tensor, first_rank(inward), group=inward, async_op=True))
    if leaders is not None:
        between.append(lambda tensor: dist.all_reduce(tensor, group=leaders, async_op=True))
    if outward.size() > 1:
        between.append(lambda tensor: dist.broadcast(tensor, first_rank(outward), group=outward, async_op=True))
    return inside, between


def _ranks_of(group: Group) -> list[int]:
    """Numbered among all ranks."""
    return [dist.get_global_rank(group, rank) for rank in range(group.size())]


def _own_group(of_ranks: Sequence[Sequence[int]]) -> Any:
    """A collective call: one group per list. Returns this rank's group, or None."""
    made = [dist.new_group(list(ranks), backend="gloo", timeout=timeout()) for ranks in of_ranks]
    return next((group for group, ranks in zip(made, of_ranks, strict=True) if dist.get_rank() in ranks), None)
