"""How long each job of a sweep takes on each slot: from speeds known before, and from jobs that have ended. Pure.

    estimates = Estimates(work={"0": 938.0, "1": 1876.0}, speed=lambda job, slot: 833.0)
    estimates.takes_s("0", "v100")
    estimates.learn(Observed("0", "v100", duration_s=41.0, trained_s=33.5))

A job's time is its start, which all have alike, and its work over the slot's speed. Without speeds, work is only
relative, and the slots are alike until jobs have ended on them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

START_S = 10.0
"""From the start of a job to its first step, and from its last step to the next job, before one has ended."""


@dataclass(frozen=True)
class Observed:
    job: str
    slot: str
    duration_s: float
    trained_s: float | None
    """Between its first step and its last; None if it reported none."""


class Estimates:
    """work: of each job, in units of `speed` times seconds. speed: of a job on a slot; None if speeds are unknown."""

    def __init__(self, work: Mapping[str, float], speed: Callable[[str, str], float] | None = None) -> None:
        self._work, self._speed = work, speed
        self._seen = list[Observed]()

    @property
    def are_known(self) -> bool:
        """Whether `takes_s` is in seconds."""
        return self._speed is not None or bool(self._seen)

    def learn(self, seen: Observed) -> None:
        self._seen.append(seen)

    def takes_s(self, job: str, slot: str) -> float:
        return self._start_s() + self._scale(slot) * self._base(job, slot)

    def _base(self, job: str, slot: str) -> float:
        return self._work[job] / self._speed(job, slot) if self._speed else self._work[job]

    def _start_s(self) -> float:
        starts = [each.duration_s - each.trained_s for each in self._seen if each.trained_s is not None]
        if starts:
            return max(0.0, statistics.median(starts))
        return START_S if self._speed and not self._seen else 0.0

    def _scale(self, slot: str) -> float:
        """Real over expected time, from this slot's jobs, else from all. Without speeds: seconds per unit."""
        mine = [each for each in self._seen if each.slot == slot] or self._seen
        ratios = [ratio for each in mine if (ratio := self._ratio(each))]
        return statistics.median(ratios) if ratios else 1.0

    def _ratio(self, seen: Observed) -> float | None:
        base = self._base(seen.job, seen.slot)
        took_s = seen.duration_s - self._start_s() if seen.trained_s is None else seen.trained_s
        return took_s / base if base > 0 and took_s > 0 else None
