"""What crosses the two cuts of a stage, and what goes with it from the first stage to the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.shared.errors import TrainError


@dataclass(frozen=True)
class Form:
    """Of one sample's labels."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Cuts:
    before: tuple[int, ...] | None
    """Shape of one sample's activations before the stage; None of the first stage."""
    behind: tuple[int, ...] | None
    """And behind it; None of the last stage."""
    dtype: torch.dtype
    """Of the numbers that travel."""
    labels: Form = Form()

    def check_output(self, output: Tensor, samples: int) -> Tensor:
        """Raises TrainError for what the next stage does not expect."""
        _check("the activations at a cut", output.shape, (samples, *(self.behind or ())))
        return output

    def check_labels(self, labels: Tensor, samples: int) -> Tensor:
        """Likewise the last one."""
        _check("labels", (*labels.shape, labels.dtype), (samples, *self.labels.shape, self.labels.dtype))
        return labels


def _check(what: str, found: Sequence[object], wanted: Sequence[object]) -> None:
    if tuple(found) != tuple(wanted):
        words = [" x ".join(map(str, one)) for one in (found, wanted)]
        raise TrainError(
            f"strategy pipeline: {what} are {words[0]}, and the data set's first samples make them {words[1]}: let "
            "`collate` give all samples one shape and type, or use ddp"
        )
