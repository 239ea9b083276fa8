"""What one GPU said of itself at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """One GPU at one moment; None for what its driver does not report."""

    rank: int
    """The rank that uses it."""
    index: int | None
    """As nvidia-smi counts."""
    wall: float | None
    utilisation: float | None
    memory_bytes: float | None
    sm_mhz: float | None
    watts: float | None
    celsius: float | None
    slowed_by: int | None
    """Bits of nvmlClocksEventReasons."""
    max_sm_mhz: float | None
    """The highest clock that the card has."""
    limit_watts: float | None
    """The power that it may draw."""
