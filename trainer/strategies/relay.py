"""Sums over Gloo in several legs, each of which has the next tensor while this one is further on.

relay = Relay(group, nodes=["a16", "a16", "a2000"], dtype=torch.bfloat16, executor=ON_DEVICE)
relay.begin(bucket).wait()               in place, in the host's memory
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.compute.executor import Executor
from trainer.compute.flat_buffer import bytes_of
from trainer.ranks.process_group import timeout
from trainer.shared import gpu_work
from trainer.strategies.base import first_rank

Group = dist.ProcessGroup
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
