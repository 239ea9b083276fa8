"""The learning rate as a function of the samples seen, whatever the ranks, shares and batch. Imports no torch.

>>> schedule = Schedule("cosine", epoch_samples=1_000, run_samples=9_000, warmup_epochs=1)
>>> [schedule.factor(seen) for seen in (500, 1_000, 5_000, 9_000)]
[0.5, 1.0, 0.5, 0.0]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LR_SCHEDULES = ("constant", "step", "cosine")


@dataclass(frozen=True)
class Schedule:
    """kind: one of LR_SCHEDULES. steps: epochs after which the rate is multiplied by `step_factor`."""

    kind: str
    epoch_samples: int
    run_samples: int
    warmup_epochs: float = 0.0
    steps: tuple[float, ...] = ()
    step_factor: float = 0.1

    @property
    def warmup_samples(self) -> float:
        # At most half of the run, so that a short run does not end at the full rate.
        return min(self.warmup_epochs * self.epoch_samples, self.run_samples / 2)

    @property
    def is_constant(self) -> bool:
        return self.kind == "constant" and not self.warmup_epochs

    def factor(self, seen: float) -> float:
        """The factor 0..1 of the full rate. seen: samples, for an update up to its middle."""
        # The warm-up is linear (Goyal et al. 2017, section 2.2). The cosine is (1 + cos(pi t)) / 2, with t from 0 at
        # the end of the warm-up to 1 at the end of the run (Loshchilov and Hutter 2017, equation 5, with a single
        # cycle).
        warmup = self.warmup_samples
        if seen < warmup:
            return seen / warmup
        if self.kind == "cosine":
            fallen = min(1.0, (seen - warmup) / (self.run_samples - warmup))
            return (1 + math.cos(math.pi * fallen)) / 2
        passed = sum(seen >= epochs * self.epoch_samples for epochs in self.steps)
        return float(self.step_factor**passed) if self.kind == "step" else 1.0


def parse_lr_steps(text: str) -> tuple[float, ...]:
    """Comma-separated epochs like 30,60,80. Raises ValueError."""
    try:
        epochs = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(f"{text!r} is not a list of epochs like 30,60,80") from None
    if not all(math.isfinite(epoch) and epoch > 0 for epoch in epochs) or list(epochs) != sorted(set(epochs)):
        raise ValueError(f"{text!r}: expected epochs above 0, each later than the one before, like 30,60,80")
    return epochs
