"""Estimates a rank's current speed from its times during a run. Imports no torch.

>>> estimate = Estimate(None)
>>> estimate.learn(128, [428.0, 431.0, 429.0])
>>> estimate.leave(128)
>>> estimate.learn(70, [254.0, 255.0, 253.0])
>>> round(estimate.speed.fixed_ms), round(estimate.speed.sample_ms, 2)      # two sizes separate both
(42, 3.03)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from trainer.shared.shares import PROBED, Speed

FRESH = 3
"""Times needed for a decision."""
KEPT = 48
SENT = 8
"""Latest times in one exchange."""
SUDDEN = 0.15
"""Older times are dropped after this relative change."""
NOISE = 0.05
"""Assumed while times are few."""
_GUESSED, _PROFILED, _SURE = 0.5, 0.1, 0.02
"""Relative errors of ms per sample."""
_STEEPER = 10.0
"""Limit of one change of ms per sample."""
# A host that became slower just then looks as if samples were free.
_LEAST_ERROR = 0.02
"""A median's: hosts may change between shares."""


class Estimate:
    """speed: measured alone, or None."""

    # With one batch size, both parts are assumed to change alike; a second size separates them.

    def __init__(self, speed: Speed | None) -> None:
        self.speed = self.best = speed
        """The current speed, and the fastest known."""
        self.is_profiled = speed is not None
        self.is_anchored = self.is_profiled
        """Whether it holds for small batches."""
        self.slope_error = _PROFILED if speed else _GUESSED
        self.noise = NOISE
        self.times_ms: list[float] = []
        self.before: tuple[int, float] | None = None
        """Samples and ms."""

    @property
    def error(self) -> float:
        """The median's."""
        return 1.25 * self.noise / math.sqrt(max(1, len(self.times_ms)))

    def expected_ms(self, samples: int) -> float:
        """0 if unknown."""
        return self.speed.step_ms(samples) if self.speed else 0.0

    def learn(self, samples: int, times_ms: Sequence[float]) -> None:
        """With the current share."""
        measured_ms = [time_ms for time_ms in times_ms if time_ms > 0]
        self.times_ms = self._of_one_speed([*self.times_ms, *measured_ms])[-KEPT:]
        if not self.times_ms:
            return
        middle_ms = statistics.median(self.times_ms)
        if len(self.times_ms) >= SENT:  # median distance from the median, scaled to a normal distribution's deviation
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
        """For updates with PROBED samples, without a share."""
        # Beyond these few samples the rank is assumed to be as fast as ever.
        time_ms = min(times_ms, default=0.0)  # disturbances make an update longer
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
        """Changes the slope by a Kalman filter of one unknown."""
        # With m samples in k micro-batches t = k*a + m*b; two such equations give b.
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
        if self.best and not self.is_profiled:  # faster by the same factor
            self.best = _through(samples_now, self.best.step_ms(samples_now), self.speed)


def _through(samples: int, time_ms: float, speed: Speed | None) -> Speed:
    """`speed` scaled to pass through this point."""
    known = speed or Speed(0.0, 1.0)
    factor = time_ms / known.step_ms(samples)
    return replace(known, fixed_ms=factor * known.fixed_ms, sample_ms=factor * known.sample_ms)
