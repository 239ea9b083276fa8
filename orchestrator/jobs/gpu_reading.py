"""What one GPU said of itself at one moment, as the lines of a host's gpu.jsonl have it. Pure.

    lines = GpuLines()
    lines.reading(parse_event(line))        # Reading(rank=0, index=1, utilisation=97.0, ...); None: it is no reading

The file is what `remote/gpus.py` wrote on the host, and as little trusted as any other: an impossible number counts for
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.jobs.metric_lines import count, number

# The largest that a number may be, and be one that a GPU can have.
MOST = {"utilisation": 100, "memory_bytes": 2**50, "sm_mhz": 1e5, "watts": 1e5, "celsius": 1e3, "slowed_by": 2**64}
MOST_LIMITS = {"max_sm_mhz": 1e5, "limit_watts": 1e5}

# Bits of NVML (nvml.h, nvmlClocksEventReasons). The first that a reading holds is its reason: a thermal slowdown sets
# the bit of a hardware slowdown, too.
POWER_CAP, SYNC_BOOST = 0x04, 0x10
REASONS = {
    0x40: "heat",  # HwThermalSlowdown
    0x20: "heat",  # SwThermalSlowdown
    0x80: "the power brake of its host",  # HwPowerBrakeSlowdown
    POWER_CAP: "its power cap",  # SwPowerCap
    SYNC_BOOST: "a slower GPU that its clocks follow (sync boost)",  # SyncBoost
    0x08: "its hardware's own protection",  # HwSlowdown
}


@dataclass(frozen=True)
class Reading:
    """One GPU at one moment; None for what its driver does not report."""

    rank: int
    """The rank that uses it."""
    index: int | None
    """As nvidia-smi counts."""
    wall: float | None
    utilisation: float | None
    """0..100."""
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


class GpuLines:
    """The lines of one host, one after the other: a limit holds until another one is reported."""

    def __init__(self) -> None:
        self._limits: dict[tuple[int, int | None], dict[str, float | None]] = {}

    def reading(self, event: Mapping[str, Any] | None) -> Reading | None:
        if event is None or event.get("event") != "gpu":
            return None
        rank, index = count(event, "rank") or 0, count(event, "index")
        if event.keys() & MOST_LIMITS.keys() or (rank, index) not in self._limits:
            self._limits[rank, index] = {name: _within(event, name, most) for name, most in MOST_LIMITS.items()}
        values = {name: _within(event, name, most) for name, most in MOST.items()}
        slowed_by = count(event, "slowed_by") if values.pop("slowed_by") is not None else None
        wall, limits = number(event, "wall"), self._limits[rank, index]
        return Reading(rank=rank, index=index, wall=wall, slowed_by=slowed_by, **values, **limits)


def slowed_by_words(slowed_by: int) -> str:
    """ "" where nothing slows it."""
    return next((words for bit, words in REASONS.items() if slowed_by & bit), "")


def _within(event: Mapping[str, Any], name: str, most: float) -> float | None:
    value = number(event, name)
    return value if value is not None and 0 <= value <= most else None
