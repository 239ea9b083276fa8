"""Layers cut over the ranks: `strategy = TensorParallel(model, layers, meeting, brake)`.

Every rank takes the whole batch and computes some of each layer's output channels; what lies between (BatchNorm, ReLU,
pooling, sums of branches) all of them compute alike from the gathered outputs. So the update is that of one process,
and over a link go, for each layer, a batch's outputs forward and the gradient of its inputs backward, whatever the
weights' number. As long as these travel nobody computes: this is for ranks that are close to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from trainer.compute.batch_norm_kernels import estimate_running_statistics
from trainer.compute.models import has_batch_norm
from trainer.compute.timer import Brake, Timer
from trainer.strategies.base import Base, Exchange, weighted
from trainer.tensor.sliced_layers import Layer, Meeting

READER = 0
"""The rank that samples, losses and judgements count for: all ranks have the same."""


class TensorParallel(Base):
    def __init__(self, model: nn.Module, layers: Sequence[Layer], meeting: Meeting, timer: Timer, brake: Brake) -> None:
        self.model, self.meeting, self.timer, self.brake = model, meeting, timer, brake
        self.counts = meeting.rank == READER
        self.parts = SlicedParts(layers)

    def backward(self, loss_sum: Tensor, samples: int, batch: int) -> Exchange:
        weighted(loss_sum, batch).backward()
        self.brake.pause("sync")
        spans, held_up_s = self.meeting.take()
        return Exchange(self.timer.mark(), held_up_s=held_up_s, waits=tuple(spans))

    def whole(self) -> nn.Module:
        return self.model

    def outputs(self, network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """All ranks compute all batches, and one judges them."""
        for pair in super().outputs(network, batches):
            self.meeting.take()
            if self.counts:
                yield pair

    def average_statistics(self, network: nn.Module, batches: Iterable[Tensor], *, again: bool = False) -> None:
        """BatchNorm's are the same on all ranks, which read the same batches."""
        if again and has_batch_norm(network):
            estimate_running_statistics(network, batches)
            self.meeting.take()


class SlicedParts:
    """Which part of a whole network's state lies on which rank."""

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
