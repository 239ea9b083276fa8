"""How fast one rank computes now, learnt from its own times during a run. Imports no torch.

    >>> estimate = Estimate(None)                       # nothing is known yet
    >>> estimate.learn(128, [428.0, 431.0, 429.0])
    >>> estimate.leave(128)                             # its share changes
    >>> estimate.learn(70, [254.0, 255.0, 253.0])
    >>> round(estimate.speed.fixed_ms), round(estimate.speed.sample_ms, 2)      # two sizes show both parts
    (42, 3.03)

A time is a line's (`Speed`: a + b*m). As long as the rank has had one size of batch, its times say how high the line
lies and nothing of a and b; the second size separates them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from trainer.shared.shares import PROBED, Speed

FRESH = 3
"""Times with the samples of now that there have to be before they are judged."""
KEPT = 48
SENT = 8
"""A rank's latest times that travel at once; so many show its noise."""
SUDDEN = 0.15
"""A rank whose latest FRESH times lie this far from those before has become another: what was before is forgotten."""
NOISE = 0.05
"""The assumed relative noise of a rank's times, as long as there are too few of them to estimate it."""
_GUESSED, _PROFILED, _SURE = 0.5, 0.1, 0.02
"""How far off the ms a sample may be, relative: by a guess, by a profile, by the best that a run can show."""
_STEEPER = 10.0
"""The ms a sample fall to no less than a tenth at once: a host that became slower just then looks as if samples were
free."""
_LEAST_ERROR = 0.02
"""The least relative error of a median: between two shares a host may have become a little faster or slower."""


class Estimate:
    """speed: as it was measured alone; None where that is not known.

    Both parts are taken to have become slower alike, until a second size of batch shows which did.
    """

    def __init__(self, speed: Speed | None) -> None:
        self.speed = self.best = speed
        """The speed now, and the fastest that was known."""
        self.is_profiled = speed is not None
        self.is_anchored = self.is_profiled
        """Whether what is known holds for small batches, too: by a profile, or by a probe."""
        self.slope_error = _PROFILED if speed else _GUESSED
        self.noise = NOISE
        self.times_ms: list[float] = []
        self.before: tuple[int, float] | None = None
        """Samples and ms with the share before."""

    @property
    def error(self) -> float:
        """The relative error of the median of its times."""
        return 1.25 * self.noise / math.sqrt(max(1, len(self.times_ms)))

    def expected_ms(self, samples: int) -> float:
        """0 where nothing is known."""
        return self.speed.step_ms(samples) if self.speed else 0.0

    def learn(self, samples: int, times_ms: Sequence[float]) -> None:
        """Its latest times with so many samples, which are its share."""
        measured_ms = [time_ms for time_ms in times_ms if time_ms > 0]
        self.times_ms = self._of_one_speed([*self.times_ms, *measured_ms])[-KEPT:]
        if not self.times_ms:
            return
        middle_ms = statistics.median(self.times_ms)
        if len(self.times_ms) >= SENT:  # the median distance from the median, as the deviation of a normal distribution
            self.noise = 1.4826 * statistics.median([abs(time_ms / middle_ms - 1) for time_ms in self.times_ms])
        self.speed = _through(samples, middle_ms, self.speed)
        if len(self.times_ms) < FRESH:
            return
        if self.before and self.before[0] != samples:
            self._separate(*self.before, samples, middle_ms)
        self.before = None
        if self.best is None or middle_ms < self.best.step_ms(samples):
            self.best = self.speed

    def probe(self, times_ms: Sequence[float]) -> None:
        """The times of updates for which it was given PROBED samples, and has no share. What is as expected teaches
        nothing; else, and the first time, it is taken to be as fast as it ever was beyond these few samples: whoever
        takes it back finds out.
        """
        time_ms = min(times_ms, default=0.0)  # what disturbs a single update makes it longer
        if time_ms <= 0:
            return
        if self.speed and self.is_anchored and abs(time_ms / self.expected_ms(PROBED) - 1) <= SUDDEN:
            return
        best = self.best or Speed(0.0, time_ms / PROBED)
        sample_ms = min(best.sample_ms, time_ms / PROBED)
        self.speed = Speed(time_ms - PROBED * sample_ms, sample_ms, best.cap)
        self.best = min(best, self.speed, key=lambda speed: speed.step_ms(PROBED))
        self.slope_error, self.is_anchored, self.before = _GUESSED, True, (PROBED, time_ms)

    def leave(self, samples: int) -> None:
        """So many samples are its share no longer."""
        if samples and len(self.times_ms) >= FRESH:
            self.before = samples, statistics.median(self.times_ms)
        self.times_ms = []

    def _of_one_speed(self, times_ms: list[float]) -> list[float]:
        before, recent = times_ms[:-FRESH], times_ms[-FRESH:]
        if len(before) < FRESH:
            return times_ms
        moved = abs(statistics.median(recent) / statistics.median(before) - 1)
        if moved <= max(SUDDEN, 4 * self.noise):
            return times_ms
        self.slope_error = max(self.slope_error, _GUESSED)
        return recent

    def _separate(self, samples: int, time_ms: float, samples_now: int, now_ms: float) -> None:
        """Turns the line about its point of now: the slope between two medians and what it was thought to be count as
        much as each is sure (a Kalman filter of one unknown).

        With m samples in k micro-batches t = k*a + m*b: of two such equations a goes, and b is left.
        """
        assert self.speed  # noqa: S101 - for the type checker
        known, error = self.speed, max(self.error, _LEAST_ERROR)
        times = known.micro_batches(samples) / known.micro_batches(samples_now)
        apart, apart_ms = times * samples_now - samples, times * now_ms - time_ms
        error_ms = math.hypot(error * times * now_ms, error * time_ms)
        # slope = apart_ms / apart, its error error_ms / apart: weights are 1 / error**2
        thought, seen = 1 / (self.slope_error * known.sample_ms) ** 2, (apart / error_ms) ** 2
        slope_ms = (thought * known.sample_ms + apart * apart_ms / error_ms**2) / (thought + seen)
        sample_ms = min(max(slope_ms, known.sample_ms / _STEEPER), now_ms / samples_now)
        fixed_ms = max(0.0, now_ms - samples_now * sample_ms) / known.micro_batches(samples_now)
        self.speed = Speed(fixed_ms, sample_ms, known.cap)
        self.slope_error = min(max(_SURE, 1 / (math.sqrt(thought + seen) * sample_ms)), _GUESSED)
        if self.best and not self.is_profiled:  # as much faster as it was
            self.best = _through(samples_now, self.best.step_ms(samples_now), self.speed)


def _through(samples: int, time_ms: float, speed: Speed | None) -> Speed:
    """The line through this point whose parts stand to each other as those of this one; without one, it has no fixed
    part.
    """
    known = speed or Speed(0.0, 1.0)
    factor = time_ms / known.step_ms(samples)
    return replace(known, fixed_ms=factor * known.fixed_ms, sample_ms=factor * known.sample_ms)
