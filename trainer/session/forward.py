"""The network as a training loop calls it: `outputs = Forward(run)(inputs)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.compute.precision import DTYPES
from trainer.data.batch import mapped
from trainer.training.run import Run


class Forward:
    """Forward in the precision of the run (`amp`); what comes of it is in 32 bits again, as losses want it. On the last
    stage of a pipeline it is that stage's part.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        with self._run.precision.autocast():
            outputs = self._run.strategy.model(*inputs, **named)
        return outputs if self._run.settings.amp == "none" else mapped(outputs, _widened)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype in DTYPES.values() else tensor
