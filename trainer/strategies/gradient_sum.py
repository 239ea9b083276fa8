"""Sums over all ranks, by the way that costs the slow link least: `sums.sum(tensor)`.

    sums = GradientSum(group, nodes=["a16", "a16", "a2000"], dtype=torch.bfloat16)
    sums.sum(gradient)                       in place, blocking: travels in 16 bits, once between the two hosts
    sums.begin(bucket).wait()                the same beside other work; sums go out in the order in which they began

Every rank has to begin the same sums in the same order.
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
from trainer.compute.executor import ON_DEVICE, Executor
from trainer.compute.timer import NO_BRAKE, Brake
from trainer.ranks.process_group import timeout
from trainer.shared import gpu_work
from trainer.shared.errors import TrainError
from trainer.strategies.base import first_rank

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


# A GPU's numbers summed over Gloo: through pinned memory of the host, and back.
#
#     staging = Staging(relay)
#     staging.begin(bucket).wait()             in place, beside what the GPU computes meanwhile
#
# Gloo takes a GPU's tensors, too, but its own thread stands on the host's first GPU, whichever one the rank has, so
# that
# no mark can be set on the rank's own when a sum is there.


class Staging:
    """On the current GPU. Copies have a stream of their own: they neither wait for what is computed, nor hold it up."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.stream = torch.cuda.Stream()
        self.leaving: queue.SimpleQueue[WaitingTensor] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    def begin(self, tensor: Tensor, arrived: Callable[[], None]) -> Any:
        """A future of the tensor, in the order in which all ranks begin them. arrived: called in the stream, and on the
        device, of the copy that brings the sum back.
        """
        computed = torch.cuda.Event(blocking=True)  # not at the cost of a core
        computed.record()
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[tensor.device])
        self.leaving.put(WaitingTensor(tensor, arrived, computed, future))
        return future

    def _send_all(self) -> None:
        torch.cuda.set_stream(self.stream)  # and with it the device: a new thread's is the host's first GPU
        while True:
            parcel = self.leaving.get()
            try:
                summed = self.relay.begin(self._fetched(parcel))
                summed.then(partial(self._deliver, parcel=parcel))
            except Exception as error:  # whoever waits for the sum shall have it
                parcel.future.set_exception(error)

    def _fetched(self, parcel: WaitingTensor) -> Tensor:
        """A copy in the host's memory, in the order of the elements: all ranks send the same, whatever theirs is."""
        parcel.computed.synchronize()
        copy = torch.empty(parcel.tensor.shape, dtype=parcel.tensor.dtype, pin_memory=True)
        copy.copy_(parcel.tensor, non_blocking=True)
        self.stream.synchronize()
        return copy

    def _deliver(self, summed: Any, parcel: WaitingTensor) -> None:
        """In the relay's last thread."""
        torch.cuda.set_stream(self.stream)
        try:
            parcel.tensor.copy_(summed.wait(), non_blocking=True)
            parcel.arrived()
            parcel.future.set_result(parcel.tensor)
        except Exception as error:
            parcel.future.set_exception(error)


class WaitingTensor(NamedTuple):
    """One tensor that waits to travel."""

    tensor: Tensor
    arrived: Callable[[], None]
    computed: torch.cuda.Event
    """After this event the tensor holds what shall travel."""
    future: Any


# Sums over Gloo in several legs, each of which has the next tensor while this one is further on.
#
# relay = Relay(group, nodes=["a16", "a16", "a2000"], dtype=torch.bfloat16, executor=ON_DEVICE)
# relay.begin(bucket).wait()               in place, in the host's memory

Leg = Callable[[Tensor], Any]
_MESSAGE = 1 << 18
"""Elements: 1 MiB of float32, in which Gloo cuts its rings' messages anyway."""


class Relay:
    """Sums on CPUs in several legs, with a thread for each, which begins it when the leg before has arrived: while one
    tensor is between the hosts, the next is rounded or added up inside of them, and backward goes on. All keep the
    order, so that it is the same on every host.

    nodes: each host adds up its own ranks' numbers, one rank a host carries the sum to the others, and gives it to its
    own. With n ranks on h hosts a link carries 2(h-1)/h of the bytes each way instead of a ring's 2(n-1)/n
    (hierarchical all-reduce, as in Horovod). A tensor goes in pieces, of which a message between hosts is 1 MiB: their
    link is idle for as long as the first piece takes to get to it, and all ranks for as long as the last takes from it.
    Without nodes it is one all-reduce. dtype: what a host's sum is rounded to before it travels.
    """

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
        """A future of the tensor."""
        if not self.piece or tensor.numel() <= self.piece:
            return self._begin(tensor)
        futures = [self._begin(piece) for piece in pieces_of(tensor, self.piece)]
        return torch.futures.collect_all(futures).then(partial(_whole, tensor=tensor))

    def _begin(self, piece: Tensor) -> Any:
        parcel = SumUnderWay(piece, piece, None, torch.futures.Future())
        self.first.put(parcel)
        return parcel.future


class SumUnderWay(NamedTuple):
    """One sum under way."""

    tensor: Tensor
    """Where the sum is to be stored."""
    sent: Tensor
    """What travels."""
    work: Any
    """Its leg that is not over, or None."""
    future: Any


def pieces_of(tensor: Tensor, elements: int) -> Sequence[Tensor]:
    """Pieces of this many elements each, in the tensor's own memory."""
    return tensor.view(-1).split(elements) if tensor.is_contiguous() else (tensor,)


def _whole(pieces: Any, tensor: Tensor) -> Tensor:
    for piece in pieces.value():
        piece.wait()  # raises what went wrong with it
    return tensor


def _carry(arriving: Any, leg: Callable[[SumUnderWay], SumUnderWay], hand_on: Callable[[SumUnderWay], None]) -> None:
    while True:
        parcel = arriving.get()
        try:
            if parcel.work:
                parcel.work.wait()
            hand_on(leg(parcel))
        except Exception as error:  # whoever waits for the sum shall have it
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
    """Apart from what else the ranks sum up meanwhile, in whatever order a thread gets to it."""
    own = _own_group([_ranks_of(group)])
    return lambda tensor: dist.all_reduce(tensor, group=own, async_op=True)


def _hosts_first(group: Group, nodes: Sequence[str]) -> tuple[list[Leg], list[Leg]]:
    """What leads to a host's sum, and what to everybody's."""
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
    """By their numbers among all ranks."""
    return [dist.get_global_rank(group, rank) for rank in range(group.size())]


def _own_group(of_ranks: Sequence[Sequence[int]]) -> Any:
    """One group for each list, made by all ranks; the one that this rank is in, or None."""
    made = [dist.new_group(list(ranks), backend="gloo", timeout=timeout()) for ranks in of_ranks]
    return next((group for group, ranks in zip(made, of_ranks, strict=True) if dist.get_rank() in ranks), None)
