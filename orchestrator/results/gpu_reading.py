"""What one GPU said of itself at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """One GPU at one moment; None for what its driver does not tell. rank: that has it. index: as nvidia-smi counts.
    slowed_by: bits of nvmlClocksEventReasons.

    max_sm_mhz, limit_watts: the highest clock that the card has, and the power that it may draw.
    """

    rank: int
    index: int | None
    wall: float | None
    utilisation: float | None
    memory_bytes: float | None
    sm_mhz: float | None
    watts: float | None
    celsius: float | None
    slowed_by: int | None
    max_sm_mhz: float | None
    limit_watts: float | None
