"""The weights of a stage that keeps a GPU's time: what a paced rank of a pipeline holds."""

from __future__ import annotations

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
