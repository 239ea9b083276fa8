"""Stages of simulated GPUs: transfers are real; numbers only if a smaller network learns."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from trainer.paced.standin import LearningPart, PacedPart
from trainer.pipeline.chain import Cuts
from trainer.pipeline.stage import StageWork
from trainer.shared.pace import BACKWARD, FORWARD


class PacedStage:
    """Like `StageWork`, without numbers and loss. Gradients are the weights themselves, to save this CPU's time."""

    learns = False

    def __init__(self, part: PacedPart, cuts: Cuts, *, splits: bool) -> None:
        self.part, self.cuts, self.splits, self.total = part, cuts, splits, torch.zeros((), dtype=torch.float64)
        self._passes: deque[int] = deque()
        self._put_off: deque[int] = deque()

    def forward(self, inputs: Tensor, there_s: float, weights: dict[str, Tensor] | None = None) -> Tensor:
        samples = len(inputs)
        self._passes.append(samples)
        self.part.stopwatch.run(FORWARD, samples, there_s)
        return torch.zeros((samples, *(self.cuts.behind or ())), dtype=self.cuts.dtype)

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


class LearningStage(StageWork):
    """Like `StageWork`; a smaller network learns within the simulated task times."""

    def __init__(self, part: LearningPart, *arguments: Any, **named: Any) -> None:
        super().__init__(part, *arguments, **named)
        self.stopwatch = part.stopwatch
        self._sizes: deque[int] = deque()
        self._sizes_put_off: deque[int] = deque()

    def forward(self, inputs: Tensor, there_s: float, weights: dict[str, Tensor] | None = None) -> Tensor:
        output = super().forward(inputs, there_s, weights)
        self._forward_is_over(len(inputs), there_s)
        return output

    def judge(self, inputs: Tensor, loss_sum: Tensor, there_s: float) -> None:
        super().judge(inputs, loss_sum, there_s)
        self._forward_is_over(len(inputs), there_s)

    def _forward_is_over(self, samples: int, there_s: float) -> None:
        self._sizes.append(samples)
        self.stopwatch.run(FORWARD, samples, there_s)

    def backward(self, gradient: Tensor | None, batch: int, there_s: float) -> Tensor | None:
        of_inputs, samples = super().backward(gradient, batch, there_s), self._sizes.popleft()
        if self.splits:
            self._sizes_put_off.append(samples)
        self.stopwatch.run(BACKWARD / 2 if self.splits else BACKWARD, samples, there_s)
        return of_inputs

    def weights(self) -> None:
        super().weights()
        self.stopwatch.run(BACKWARD / 2, self._sizes_put_off.popleft())
