"""The learning rate as a function of the samples that a run has seen. Imports no torch.

    >>> schedule = Schedule("cosine", epoch_samples=1_000, run_samples=9_000, warmup_epochs=1)
    >>> [schedule.factor(seen) for seen in (500, 1_000, 5_000, 9_000)]
    [0.5, 1.0, 0.5, 0.0]

Samples are the same whatever the number of ranks, their shares and the batch, and a run that goes on from a checkpoint
has seen as many as one that was never interrupted: so the rate is the same, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LR_SCHEDULES = ("constant", "step", "cosine")


@dataclass(frozen=True)
class Schedule:
    """kind: one of LR_SCHEDULES. steps: epochs after each of which the rate is multiplied by `step_factor`."""

    kind: str
    epoch_samples: int
    run_samples: int
    """Of all epochs."""
    warmup_epochs: float = 0.0
    steps: tuple[float, ...] = ()
    step_factor: float = 0.1

    @property
    def warmup_samples(self) -> float:
        """At most half of all: a run of a single epoch would end at the full rate, in the midst of its noise."""
        return min(self.warmup_epochs * self.epoch_samples, self.run_samples / 2)

    @property
    def is_constant(self) -> bool:
        return self.kind == "constant" and not self.warmup_epochs

    def factor(self, seen: float) -> float:
        """What the full rate is multiplied by, 0..1. seen: samples; of an update those up to its middle.

        The warm-up rises in a straight line from 0 to the full rate (Goyal et al. 2017, section 2.2). The cosine is
        (1 + cos(pi t)) / 2, with t from 0 at the end of the warm-up to 1 at the end of the run (Loshchilov and Hutter
        2017, equation 5, of a single cycle down to 0).
        """
        warmup = self.warmup_samples
        if seen < warmup:
            return seen / warmup
        if self.kind == "cosine":
            fallen = min(1.0, (seen - warmup) / (self.run_samples - warmup))
            return (1 + math.cos(math.pi * fallen)) / 2
        passed = sum(seen >= epochs * self.epoch_samples for epochs in self.steps)
        return float(self.step_factor**passed) if self.kind == "step" else 1.0


def parse_lr_steps(text: str) -> tuple[float, ...]:
    """Epochs with commas between, like 30,60,80. Raises ValueError with a sentence."""
    try:
        epochs = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(f"{text!r} is not a list of epochs like 30,60,80") from None
    if not all(math.isfinite(one) and one > 0 for one in epochs) or list(epochs) != sorted(set(epochs)):
        raise ValueError(f"{text!r}: expected epochs above 0, each later than the one before, like 30,60,80")
    return epochs
