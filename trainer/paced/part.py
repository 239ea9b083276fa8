"""What a paced rank of a pipeline holds: weights of a stage that keeps a GPU's time, and perhaps a part that learns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.paced.stage_clock import StageClock


class PacedPart(nn.Module):
    """Weights like the stage's own."""

    def __init__(self, like: Sequence[Tensor], stopwatch: StageClock) -> None:
        super().__init__()
        self.stopwatch = stopwatch
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(one.shape).normal_(std=1e-3)) for one in like)


class LearningPart(PacedPart):
    """Beside weights like a stage's own, which are zeros here and stay it, the part of a smaller network that learns.

    What comes in and goes out are rows of numbers, as many as the stage's own would be: the network's, and zeros.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        stopwatch: StageClock,
        network: nn.Module,
        before: tuple[int, ...] | None,
        sent: int | None,
    ) -> None:
        """before: the shape of one sample that the network takes; None of images. sent: numbers of one sample that
        leave; None of the last stage.
        """
        super().__init__(like, stopwatch)
        with torch.no_grad():
            for weight in self.weights:
                weight.zero_()
        self.network, self.before, self.sent = network, before, sent

    def forward(self, inputs: Tensor) -> Tensor:
        if self.before is not None:
            inputs = inputs[:, : math.prod(self.before)].unflatten(1, self.before)
        output: Tensor = self.network(inputs)
        if self.sent is None:
            return output
        output = output.flatten(1)
        return nn.functional.pad(output, (0, self.sent - output.shape[1]))
