"""What a strategy is, and how the samples of unequal ranks come to count alike.

With l_j the mean loss over rank j's m_j samples of n, the gradient to find is sum_j (m_j/n) grad l_j. Every strategy
that exchanges gradients adds them up, so each rank's loss is first multiplied by m_j/n: this makes it 1/n times the sum
of its samples' losses. It stays exact for unequal shares, and for a share of 0; no pass over the gradients is spent on
it, and what is rounded or compressed on its way has its weight already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer.strategies.sync_batch_norm import is_synchronised
from trainer.strategies.without_samples import no_loss


class Exchange(NamedTuple):
    """What one exchange of gradients left on the device's time line."""

    computed: Any
    """The mark of this rank's own last gradient."""
    collectives: tuple[tuple[Any, Any], ...] = ()
    """For each one that ran beside backward, the marks of when this rank handed it over and when the sum was there, in
    the order of their ends.
    """
    held_up_s: float = 0.0
    """How long this rank stood still on purpose between the calls that came after `computed`."""
    waits: tuple[tuple[Any, Any], ...] = ()
    """Marks of begin and end of each time before `computed` in which this rank stood still for another's data."""
    tasks: tuple[Any, ...] = ()
    """What a stage of a pipeline did when."""
    wire_ms: float | None = None
    """How long a stage of a pipeline had a message on its way out; None elsewhere."""
    said: tuple[Tensor, int] | None = None
    """What rank 0 says to people where it computes no loss itself: the sum of others', and of how many samples."""


class Parts(Protocol):
    """Which part of a network's state lies on which rank, where no rank has all of it."""

    def held(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        """What the rank holds, as views. state: of the whole network, by name, or numbers that belong to its weights.
        network: the whole one, of which names alone are looked at.
        """

    def kept(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        """The same less what a lower rank holds as well."""


class Strategy(Protocol):
    @property
    def model(self) -> nn.Module:
        """What the forward pass calls."""

    @property
    def parts(self) -> Parts | None:
        """None where each rank holds the whole network."""

    @property
    def counts(self) -> bool:
        """Do the samples that this rank reads count as its own? Not where another reads the same ones."""

    def outputs(self, network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and labels of what this rank is to judge. network: `whole`. batches: the test data that it reads, on
        its device.
        """

    def average_statistics(self, network: nn.Module, batches: Iterable[Tensor], *, again: bool = False) -> None:
        """BatchNorm's, over all that hold the same part, where ranks hold parts. network: `whole`. batches: of training
        images that this rank reads, from which they are estimated again where they belong to other weights (again: by
        the caller's word).
        """

    @property
    def keeps_statistics(self) -> bool:
        """Do the weights of `whole` come so close to those that each rank trains with, that BatchNorm's running
        statistics of these belong to them?
        """

    @property
    def updates_alone(self) -> bool:
        """May a rank take updates of its own between two that all make?"""

    @property
    def meets_in_forward(self) -> bool:
        """Do the ranks wait for each other in the forward pass, so that a rank without samples has to make one?"""

    def no_loss(self) -> Tensor:
        """Of a rank without samples, in place of a forward pass: `backward` and `accumulate` make zeros of it."""

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        """Leaves in .grad what the optimiser shall use: the gradient of the mean loss over the whole batch, each
        part of it as its own rank's network sees it, or of a rank's own part where weights are averaged.

        loss_sum: of this rank's `samples`, which are part of `batch` over all ranks; of its last micro-batch, where
        others went before it through `accumulate`. samples: of all of them.
        """

    def without_sync(self) -> AbstractContextManager[object]:
        """Around forward and `accumulate` of a micro-batch that another one follows: nothing travels."""

    def backward_alone(self, loss_sum: Tensor, samples: int) -> None:
        """For an update of this rank's own, from so many samples, where there may be any."""

    def accumulate(self, loss_sum: Tensor, samples: int, batch: int) -> None:
        """Adds a micro-batch's gradient to .grad; `backward` sends the sum. samples: of this rank's whole update."""

    def after_update(self) -> None:
        """Called when the optimiser has moved the weights: what a strategy sends then counts as synchronisation."""

    def settle(self) -> None:
        """Waits for what travels beside training, which changes nothing but when it has arrived."""

    def own_state(self) -> dict[str, Tensor]:
        """What this rank needs to go on beside momentum and the weights of `whole`, by name (KIND or KIND.WHICH), to be
        kept and written into again.
        """

    def expect(self, kept: Mapping[str, Tensor]) -> None:
        """Makes `own_state` one into which this, of a checkpoint, can be written, the weights being those of `whole`
        already. Raises TrainError.
        """

    def regroup(self, part: float) -> None:
        """After that, where other ranks, or shares, wrote the checkpoint. part: of each batch, that is this rank's."""

    def whole(self) -> nn.Module:
        """The network with the weights that all ranks share, for evaluations and checkpoints: the run's own or a copy,
        so that nobody may change them. Called by all ranks; the run goes on as if nobody had.
        """


class WholeNetwork:
    """What strategies have alike that give each rank the whole network, and samples of its own."""

    parts: Parts | None = None
    counts = True

    def outputs(self, network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        return ((network(images), labels) for images, labels in batches)

    def average_statistics(self, network: nn.Module, batches: Iterable[Tensor], *, again: bool = False) -> None:
        raise NotImplementedError  # parts is None


class Base(WholeNetwork):
    """What most strategies have alike: ranks weigh their gradients as `weighted` does, nothing travels during backward
    or after the update, and nothing has to be kept.
    """

    updates_alone = False

    @property
    def keeps_statistics(self) -> bool:
        return True

    @property
    def meets_in_forward(self: Strategy) -> bool:
        return is_synchronised(self.model)

    def no_loss(self: Strategy) -> Tensor:
        return no_loss(self.model)

    def without_sync(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def accumulate(self, loss_sum: Tensor, samples: int, batch: int) -> None:
        backward_weighted(loss_sum, batch)

    def backward_alone(self, loss_sum: Tensor, samples: int) -> None:
        raise NotImplementedError  # updates_alone is False

    def after_update(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def own_state(self) -> dict[str, Tensor]:
        return {}

    def expect(self, kept: Mapping[str, Tensor]) -> None:
        pass

    def regroup(self, part: float) -> None:
        pass


def local_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of this rank's samples."""
    return cross_entropy(model(images), labels, reduction="sum")


def weighted(loss_sum: Tensor, batch: int) -> Tensor:
    """The loss to differentiate, for a rank whose samples are part of `batch` over all ranks."""
    return loss_sum / batch


def backward_weighted(loss_sum: Tensor, batch: int) -> None:
    """`weighted(loss_sum, batch).backward()`, to the same bits, without an operation that divides."""
    loss_sum.backward(loss_sum.new_full(loss_sum.shape, 1 / batch))


def share_initial_state(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Leaves rank 0's weights and buffers on every rank."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=first_rank(group), group=group)


def first_rank(group: dist.ProcessGroup) -> int:
    """The number, among all ranks, of the group's first one: collectives name their root so."""
    return dist.get_global_rank(group, 0)
