"""Measures growing batch sizes until memory or time ends, and fits a line to their times. Pure: updates come from
elsewhere.

Measurements are generators that yield a batch size and are sent its times, or thrown NoMemory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trainer.measure.updates import NoMemory, Times
from trainer.shared.alpha_beta import Line, fit
from trainer.shared.errors import TrainError

Result = TypeVar("Result")
Measuring = Generator[int, Times, Result]

FIRST = 2
"""Smallest batch: BatchNorm needs two samples."""
FEWEST, MOST = 2, 15
"""Timed updates per size, after at least one untimed update."""
ENOUGH = 2
"""Sizes at which a paced rank must be in time."""
STRAIGHT = 0.02
"""Relative error of times on a line."""


@dataclass(frozen=True)
class Ladder:
    times: dict[int, Times]
    """By size, ascending."""
    cap: int | None
    """The most samples that fit; None without a limit."""

    @property
    def in_time(self) -> dict[int, Times]:
        """Sizes without lateness."""
        return {samples: times for samples, times in self.times.items() if times.kept_pace}

    @property
    def kept_pace(self) -> bool:
        """Whether these are enough for a line."""
        return len(self.in_time) >= min(ENOUGH, len(self.times))

    @property
    def counted(self) -> dict[int, Times]:
        """Sizes for the line."""
        return self.in_time if self.kept_pace else self.times

    def lateness(self) -> float | None:
        """The largest of valid sizes; None unless paced."""
        return max((times.lateness for times in self.counted.values() if times.lateness is not None), default=None)


def made(measuring: Measuring[Result], update: Callable[[int], Times]) -> Result:
    try:
        samples = next(measuring)
        while True:
            try:
                times = update(samples)
            except NoMemory as error:
                samples = measuring.throw(error)
            else:
                samples = measuring.send(times)
    except StopIteration as end:
        result: Result = end.value
        return result


def climb(
    limit: int, budget_s: float, now: Callable[[], float] = time.monotonic, untimed: int = 1
) -> Measuring[Ladder]:
    """Doubles the batch, with two sizes at least. untimed: updates before timed ones. Raises
    TrainError if none fits.
    """
    # If a paced rank was late at nearly all sizes, they are measured again in the remaining time.
    deadline_s = now() + budget_s
    ladder = yield from _double(limit, budget_s, deadline_s, now, untimed)
    for samples in sorted(ladder.times, reverse=True):
        needed_s = FEWEST * ladder.times[samples].step_ms / 1000
        if not ladder.kept_pace and not ladder.times[samples].kept_pace and now() + needed_s <= deadline_s:
            ladder.times[samples] = yield from median(samples, budget_s / 20, now)
    return ladder


def again(ladder: Ladder, budget_s: float, now: Callable[[], float] = time.monotonic) -> Measuring[dict[str, object]]:
    """Measures the middle size again: a hot card becomes slower."""
    samples = sorted(ladder.counted)[len(ladder.counted) // 2]
    times = yield from median(samples, budget_s / 20, now)
    return {"again_samples": samples, "again_ms": round(times.step_ms, 4)}


def _double(
    limit: int, budget_s: float, deadline_s: float, now: Callable[[], float], untimed: int
) -> Measuring[Ladder]:
    times: dict[int, Times] = {}
    samples = min(FIRST, limit)
    while True:
        try:
            for _ in range(untimed if times else untimed + FEWEST):
                yield samples
            times[samples] = yield from median(samples, budget_s / 20, now)
        except NoMemory as error:
            if not times:
                why = f" ({error})" if str(error) else ""
                raise TrainError(f"out of memory: not even {samples} samples fit{why}; use a smaller model") from None
            break
        following = min(2 * samples, limit)
        needed_s = (untimed + FEWEST) * times[samples].step_ms * following / samples / 1000
        if following == samples or (len(times) > 1 and now() + needed_s > deadline_s):
            return Ladder(times, None)
        samples = following
    return Ladder(times, (yield from _squeeze(max(times), samples)))


def median(samples: int, budget_s: float, now: Callable[[], float] = time.monotonic) -> Measuring[Times]:
    """Two updates or more."""
    began_s, found = now(), list[Times]()
    while len(found) < FEWEST or (len(found) < MOST and now() - began_s < budget_s):
        found.append((yield samples))
    late = [times.lateness for times in found if times.lateness is not None]
    return Times(
        statistics.median(times.step_ms for times in found),
        statistics.median(times.forward_ms for times in found),
        statistics.median(times.optim_ms for times in found),
        statistics.median(late) if late else None,
    )


def _squeeze(fits: int, too_large: int) -> Measuring[int]:
    """The largest size that fits, to a sixteenth."""
    while too_large - fits > max(1, fits // 16):
        middle = (fits + too_large) // 2
        try:
            yield middle
            fits = middle
        except NoMemory:
            too_large = middle
    return fits


def line_of(points: Sequence[tuple[float, float]]) -> Line | None:
    """Through the largest sizes on a line, three at least. points: (samples, seconds), ascending."""
    line = fit(points)
    while line and line.worst_error > STRAIGHT and len(points) > 3:
        points = points[1:]
        line = fit(points)
    return line


def record_of(ladder: Ladder) -> dict[str, object]:
    counted, largest = ladder.counted, max(ladder.counted)
    last = counted[largest]
    line = line_of([(samples, times.step_ms / 1000) for samples, times in counted.items()])
    slope_ms = 1000 * line.slope_s if line else last.step_ms / largest
    return {
        "samples": list(ladder.times),
        "step_ms": [round(times.step_ms, 4) for times in ladder.times.values()],
        "lateness": [times.lateness and round(times.lateness, 6) for times in ladder.times.values()],
        "fixed_ms": round(1000 * line.alpha_s, 6) if line else 0.0,
        # A GPU that was flat over all sizes becomes slower at larger ones: no share is free.
        "sample_ms": max(slope_ms, 1e-3 * last.step_ms / largest),
        "worst_error": round(line.worst_error, 6) if line else None,
        "largest": max(largest, ladder.cap or 0),
        "cap": ladder.cap,
        "forward_ms": round(last.forward_ms, 4),
        "optim_ms": round(last.optim_ms, 4),
    }
