"""What crosses the two cuts of a stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cuts:
    before: tuple[int, ...] | None
    """Shape of one sample's activations before the stage; None of the first stage."""
    behind: tuple[int, ...] | None
    """And behind it; None of the last stage."""
    dtype: torch.dtype
    """Of the numbers that travel."""
