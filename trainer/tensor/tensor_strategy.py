"""`tensor`: all ranks take the whole batch, and each computes some output channels of every layer.

The update is that of one process. Each layer's outputs and input gradients travel, with no overlap: for close ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from trainer.compute.batch_norm_kernels import estimate_running_statistics
from trainer.compute.models import has_batch_norm
from trainer.compute.timer import InjectedDelay, Timer
from trainer.strategies.base import Base, Exchange, weighted
from trainer.tensor.sliced_layers import Layer, Meeting

READER = 0
"""The rank whose samples, losses and evaluations count; all ranks have the same."""


class TensorParallel(Base):
    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], meeting: Meeting, timer: Timer, delay: InjectedDelay
    ) -> None:
        self.model, self.meeting, self.timer, self.delay = model, meeting, timer, delay
        self.counts = meeting.rank == READER
        self.parts = SlicedParts(layers)

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        weighted(loss_sum, batch).backward()
        self.delay.pause("sync")
        spans, held_up_s = self.meeting.take()
        return Exchange(self.timer.mark(), held_up_s=held_up_s, waits=tuple(spans))

    def whole(self) -> nn.Module:
        return self.model

    def outputs(self, network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """All ranks compute all batches; one evaluates them."""
        for pair in super().outputs(network, batches):
            self.meeting.take()
            if self.counts:
                yield pair

    def average_statistics(self, network: nn.Module, batches: Iterable[Tensor], *, again: bool = False) -> None:
        # BatchNorm's statistics are equal on all ranks.
        if again and has_batch_norm(network):
            estimate_running_statistics(network, batches)
            self.meeting.take()


class SlicedParts:
    def __init__(self, layers: Sequence[Layer]) -> None:
        self.slices = {f"{layer.name}.{kind}": layer.slices for layer in layers for kind in ("weight", "bias")}

    def held(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        return {
            name: tensor.narrow(0, *self.slices[name].own(rank)) if name in self.slices and tensor.dim() else tensor
            for name, tensor in state.items()
        }

    def kept(self, rank: int, state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
        held = self.held(rank, state, network)
        return held if rank == READER else {name: tensor for name, tensor in held.items() if name in self.slices}
