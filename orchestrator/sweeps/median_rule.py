"""The median rule: which running jobs of a sweep are worse than most were at the same step. Pure.

A job is stopped after LEAST_STEPS if its best value up to a step is worse than the median of the others' means up to
that step, among at least LEAST_OTHERS jobs that have come so far (D. Golovin et al., Google Vizier, KDD 2017, 3.2.2).
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence

LEAST_OTHERS = 3
LEAST_STEPS = 20

History = Sequence[tuple[int, float]]
"""Steps in rising order, and the value at each: lower is better."""


def is_bad(job: str, histories: Mapping[str, History]) -> bool:
    mine = histories.get(job, ())
    if not mine or mine[-1][0] < LEAST_STEPS:
        return False
    step = mine[-1][0]
    others = [_mean_until(step, other) for name, other in histories.items() if name != job and _reaches(step, other)]
    return len(others) >= LEAST_OTHERS and min(value for _, value in mine) > statistics.median(others)


def _reaches(step: int, history: History) -> bool:
    return bool(history) and history[-1][0] >= step


def _mean_until(step: int, history: History) -> float:
    upto = bisect_right(history, step, key=lambda each: each[0])
    return statistics.fmean(value for _, value in history[: max(1, upto)])
