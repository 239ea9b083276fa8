"""`allreduce`, `gather_scatter`, `reduce_scatter` etc.: exchange gradients after backward, blocking."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from trainer.compute.buffers import bytes_of, flatten, unflatten
from trainer.compute.models import gradients_of
from trainer.compute.timer import InjectedDelay, Timer
from trainer.shared import gpu_work
from trainer.strategies.base import (
    Base,
    Exchange,
    first_rank,
    refuse_sparse,
    refuse_unused,
    share_initial_state,
    weighted,
)
from trainer.strategies.gradient_sum import GradientSum

Gradients = Sequence[Tensor]
Swap = Callable[[Gradients, GradientSum], None]


class AfterBackward(Base):
    """The time after this rank's last gradient is transfer and waiting."""

    def __init__(self, model: nn.Module, sums: GradientSum, timer: Timer, delay: InjectedDelay, exchange: Swap) -> None:
        self.model = model
        self.sums = sums
        self.timer = timer
        self.delay = delay
        self.exchange = exchange
        share_initial_state(model, sums.group)

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        weighted(loss_sum, batch).backward()
        self.delay.pause("sync")
        computed = self.timer.mark()
        gradients = gradients_of(self.model)
        if any(gradient is None for gradient in gradients):
            refuse_unused(self.model, loss_sum)
        if any(gradient.is_sparse for gradient in gradients):
            refuse_sparse(self.model)
        before_s = self.sums.held_up_s
        self.exchange(gradients, self.sums)
        return Exchange(computed, held_up_s=self.sums.held_up_s - before_s)

    def whole(self) -> nn.Module:
        return self.model


def joined(gradients: Gradients, sums: GradientSum) -> Tensor:
    flat = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
    sums.executor(gpu_work.copy(bytes_of(flat)), lambda: flatten(gradients, out=flat))
    return flat


def taken_apart(flat: Tensor, gradients: Gradients, sums: GradientSum) -> None:
    sums.executor(gpu_work.copy(bytes_of(flat)), lambda: unflatten(flat, gradients))


def added_up(gathered: Sequence[Tensor], sums: GradientSum) -> Tensor:
    total = torch.empty_like(gathered[0])
    sums.executor(gpu_work.copy(len(gathered) * bytes_of(total)), lambda: sum_in_order(gathered, total))
    return total


def allreduce(gradients: Gradients, sums: GradientSum) -> None:
    """One all_reduce per parameter."""
    for gradient in gradients:
        sums.sum(gradient)


def allreduce_flat(gradients: Gradients, sums: GradientSum) -> None:
    """One all_reduce of all gradients in one buffer (like Horovod's tensor fusion, Sergeev and Del Balso 2018)."""
    flat = joined(gradients, sums)
    sums.sum(flat)
    taken_apart(flat, gradients, sums)


def reduce_broadcast(gradients: Gradients, sums: GradientSum) -> None:
    """The sum goes to rank 0 and back to all, like with a parameter server (Li et al. 2014)."""
    flat, group = joined(gradients, sums), sums.group
    sums.hold_up()
    dist.reduce(flat, dst=first_rank(group), group=group)
    sums.hold_up()
    dist.broadcast(flat, src=first_rank(group), group=group)
    taken_apart(flat, gradients, sums)


def gather_scatter(gradients: Gradients, sums: GradientSum) -> None:
    """Rank 0 gathers and adds all gradients, and scatters the sum: its link carries everything twice."""
    flat, group = joined(gradients, sums), sums.group
    is_first = dist.get_rank(group) == 0
    gathered = [torch.empty_like(flat) for _ in range(group.size())] if is_first else None
    sums.hold_up()
    dist.gather(flat, gathered, dst=first_rank(group), group=group)
    copies = [added_up(gathered, sums)] * group.size() if gathered else None
    sums.hold_up()
    dist.scatter(flat, copies, src=first_rank(group), group=group)
    taken_apart(flat, gradients, sums)


def allgather(gradients: Gradients, sums: GradientSum) -> None:
    """Every rank gathers and adds all gradients. The order of sums does not depend on the collective's algorithm."""
    flat, group = joined(gradients, sums), sums.group
    gathered = [torch.empty_like(flat) for _ in range(group.size())]
    sums.hold_up()
    dist.all_gather(gathered, flat, group=group)
    taken_apart(added_up(gathered, sums), gradients, sums)


def reduce_scatter(gradients: Gradients, sums: GradientSum) -> None:
    """Each rank adds up one piece and gives it to all: a ring all-reduce in two halves (Patarasu and Yuan 2009), like
    in sharded optimisers (ZeRO, Rajbhandari et al. 2020).
    """
    flat, group = joined(gradients, sums), sums.group
    flat = pad(flat, (0, -len(flat) % group.size()))  # equal pieces
    pieces = list(flat.chunk(group.size()))
    sums.hold_up()
    own = reduced_piece(flat, pieces, group)
    sums.hold_up()
    dist.all_gather(pieces, own, group=group)
    taken_apart(flat, gradients, sums)


EXCHANGES: dict[str, Swap] = {
    exchange.__name__: exchange
    for exchange in (allreduce, allreduce_flat, reduce_broadcast, gather_scatter, allgather, reduce_scatter)
}


def reduced_piece(flat: Tensor, pieces: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """The sum of this rank's piece."""
    # Older Gloo has no reduce_scatter and raises before it sends anything.
    own = torch.empty_like(pieces[0])
    try:
        dist.reduce_scatter_tensor(own, flat, group=group)
    except RuntimeError as error:
        if "support" not in str(error):
            raise
        for rank, piece in enumerate(pieces):
            dist.reduce(piece, dst=dist.get_global_rank(group, rank), group=group)
        own = pieces[dist.get_rank(group)].clone()
    return own


def sum_in_order(tensors: Sequence[Tensor], total: Tensor) -> None:
    total.copy_(tensors[0])
    for tensor in tensors[1:]:
        total += tensor
