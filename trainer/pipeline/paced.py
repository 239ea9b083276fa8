"""A stage that keeps a GPU's time in place of computing: what crosses its cuts is real, the numbers are not."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from trainer.paced.part import PacedPart
from trainer.pipeline.cuts import Cuts
from trainer.shared.pace import BACKWARD, FORWARD


class PacedStage:
    """As `Stage`. Gradients of weights are the weights themselves: to make others would take this CPU longer than a
    fast GPU its whole backward. Nobody computes a loss.
    """

    learns = False

    def __init__(self, part: PacedPart, cuts: Cuts, *, splits: bool) -> None:
        self.part, self.cuts, self.splits = part, cuts, splits
        self._passes: deque[int] = deque()
        self._put_off: deque[int] = deque()

    def forward(self, inputs: Tensor, there_s: float) -> Tensor:
        samples = len(inputs)
        self._passes.append(samples)
        self.part.stopwatch.run(FORWARD, samples, there_s)
        if self.cuts.behind is None:
            return torch.zeros(())
        return torch.zeros((samples, *self.cuts.behind), dtype=self.cuts.dtype)

    def backward(self, gradient: Tensor | None, batch: int, there_s: float) -> Tensor | None:
        samples = self._passes.popleft()
        self.part.stopwatch.run(BACKWARD / 2 if self.splits else BACKWARD, samples, there_s)
        if self.splits:
            self._put_off.append(samples)
        else:
            self._give_gradients()
        return None if self.cuts.before is None else torch.zeros((samples, *self.cuts.before), dtype=self.cuts.dtype)

    def weights(self) -> None:
        self.part.stopwatch.run(BACKWARD / 2, self._put_off.popleft())
        self._give_gradients()

    def _give_gradients(self) -> None:
        for weight in self.part.weights:
            weight.grad = weight.detach()
