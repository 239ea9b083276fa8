"""Why a host's GPU ran below its possible clock: power, heat, or hardware. Pure. An idle GPU, or one with clocks set by
its owner, is not slowed.
"""

from __future__ import annotations

from collections import Counter

from orchestrator.files import Record
from orchestrator.jobs.live_stats import POWER_CAP, REASONS, Reading, slowed_by_words
from orchestrator.units import format_percent

# Below it, a GPU does not need its clocks.
BUSY_PERCENT = 20
# Shorter slowdowns of a run are not mentioned.
LEAST_SHARE = 0.05
# Cards often report a power cap that hardly matters.
LEAST_LOSS = 0.03


class Slowed(Record):
    rank: int
    by: str
    """The cause."""
    share: float
    """0..1 of its readings."""
    mhz: float | None = None
    """Median SM clock."""
    instead_mhz: float | None = None
    """Median SM clock while busy and not slowed."""
    most_mhz: float | None = None
    limit_watts: float | None = None
    """Only for a power cap."""

    @property
    def words(self) -> str:
        cap = f" of {self.limit_watts:.0f} W" if self.limit_watts else ""
        return f"slowed by {self.by}{cap} for {format_percent(self.share)} of the run{self._clocks}"

    @property
    def _clocks(self) -> str:
        if self.mhz is None:
            return ""
        if self.instead_mhz:
            return f": {self.mhz:,.0f} instead of {self.instead_mhz:,.0f} MHz"
        return f": {self.mhz:,.0f} MHz" + (f" of at most {self.most_mhz:,.0f}" if self.most_mhz else "")


def is_slowed(slowed_by: int | None) -> bool:
    return bool(slowed_by and slowed_by_words(slowed_by))


class Slowing:
    """Memory does not grow with the run."""

    def __init__(self) -> None:
        self._gpus: dict[tuple[int, int | None], _Gpu] = {}

    def add(self, reading: Reading) -> None:
        if reading.slowed_by is not None:
            self._gpus.setdefault((reading.rank, reading.index), _Gpu()).add(
                reading, slowed_by_words(reading.slowed_by)
            )

    def found(self) -> Slowed | None:
        """The GPU slowed longest; None if it hardly matters."""
        each = [slowed for (rank, _), gpu in self._gpus.items() if (slowed := gpu.slowed(rank))]
        return max(each, key=lambda slowed: slowed.share, default=None)


class _Gpu:
    def __init__(self) -> None:
        self._readings = 0
        self._reasons = Counter[str]()
        self._slow_mhz, self._free_mhz = Counter[int](), Counter[int]()
        self._most_mhz: float | None = None
        self._limit_watts: float | None = None

    def add(self, reading: Reading, reason: str) -> None:
        self._readings += 1
        self._most_mhz, self._limit_watts = reading.max_sm_mhz, reading.limit_watts
        is_busy = reading.utilisation is None or reading.utilisation >= BUSY_PERCENT
        if reason:
            self._reasons[reason] += 1
        if reading.sm_mhz is not None and (reason or is_busy):
            (self._slow_mhz if reason else self._free_mhz)[round(reading.sm_mhz)] += 1

    def slowed(self, rank: int) -> Slowed | None:
        share = self._reasons.total() / max(1, self._readings)
        mhz, instead_mhz = _median(self._slow_mhz), _median(self._free_mhz)
        could_mhz = instead_mhz or self._most_mhz
        if share < LEAST_SHARE or (mhz and could_mhz and mhz > (1 - LEAST_LOSS) * could_mhz):
            return None
        by = self._reasons.most_common(1)[0][0]
        limit_watts = self._limit_watts if by == REASONS[POWER_CAP] else None
        return Slowed(
            rank=rank, by=by, share=share, mhz=mhz, instead_mhz=instead_mhz, most_mhz=self._most_mhz,
            limit_watts=limit_watts,
        )  # fmt: skip


def _median(counts: Counter[int]) -> float | None:
    """For an even number of values the upper middle one."""
    left = counts.total() // 2
    for value in sorted(counts):
        if left < counts[value]:
            return value
        left -= counts[value]
    return None
