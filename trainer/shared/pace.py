"""The speed of a GPU that a rank simulates (ORCH_PACED, from `paced` in the inventory). Imports no torch.

>>> pace = read_pace('{"samples_per_s": 333, "fixed_ms": 2}')
>>> round(pace.step_s(samples=128, step=0), 3)      # forward, backward and the optimiser
0.386
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from typing import Any

from trainer.shared.errors import TrainError
from trainer.shared.experiments import NAMED
from trainer.shared.gpu_work import GB_PER_S

FORWARD, BACKWARD, OPTIMISER = 0.33, 0.66, 0.01
"""Parts of a step's time."""
# Backward computes two products per layer, forward one. The optimiser of ResNet-152 moves 1.2 GB: 1.3 ms of a V100's
# 154 ms at 900 GB/s.


@dataclass(frozen=True)
class Pace:
    samples_per_s: float
    fixed_ms: float = 0.0
    jitter: float = 0.0
    memory_bytes: int | None = None
    slowdown: tuple[tuple[int, float], ...] = ()
    """(step, factor) by step: from that step on, everything takes factor times as long."""
    gb_per_s: float = GB_PER_S
    """Memory bandwidth, for the work in `gpu_work`."""
    like: str = ""
    """The simulated experiment, while the run's own, smaller network learns within its time. Empty: the run's own is
    simulated and does not learn.
    """

    def step_s(self, samples: int, step: int, seed: object = 0) -> float:
        """A whole step. Ranks with equal seeds have equal jitter."""
        return self.part_s(samples, step, seed, work=1, kernels=1)

    def part_s(self, samples: int, step: int, seed: object, *, work: float, kernels: float) -> float:
        """A part of the network: its part of the multiplications, and of the layers whose kernels are started."""
        factor = 1.0
        for at_step, slower in self.slowdown:
            if step >= at_step:
                factor = slower
        if self.jitter:
            factor *= 1 + self.jitter * random.Random(f"{seed}/{step}").uniform(-1, 1)  # noqa: S311, no secret
        return factor * (kernels * self.fixed_ms / 1000 + work * samples / self.samples_per_s)


def no_pace_for(name: str) -> TrainError:
    """No speed is known for a network that is no experiment's."""
    return TrainError(
        f"paced hosts run only experiments, not {name}; use --exp, or leave `paced:` out of the inventory"
    )


def read_pace(text: str) -> Pace:
    """Raises TrainError for an invalid text."""
    try:
        given: dict[str, Any] = json.loads(text)
        changes = sorted((int(change["at_step"]), float(change["factor"])) for change in given.pop("slowdown", ()))
        pace = Pace(**{name: value for name, value in given.items() if value is not None}, slowdown=tuple(changes))
        _check(pace)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise TrainError(
            f"ORCH_PACED is {text[:200]!r} ({error}); expected a JSON object like "
            '{"samples_per_s": 333, "fixed_ms": 0, "jitter": 0, "slowdown": [{"at_step": 100, "factor": 2}]}'
        ) from error
    return pace


def _check(pace: Pace) -> None:
    """Raises ValueError or TypeError."""
    # The bounds are so wide that only mistakes exceed them, and no sum overflows.
    speeds = [pace.samples_per_s, *(factor for _, factor in pace.slowdown)]
    if not all(1e-6 <= speed <= 1e12 for speed in speeds):
        raise ValueError("samples_per_s and factors must be between 1e-6 and 1e12")
    if not 0 <= pace.fixed_ms <= 3_600_000 or not 0 <= pace.jitter <= 1:
        raise ValueError("fixed_ms must be between 0 and 3600000, jitter between 0 and 1")
    if not 1e-3 <= pace.gb_per_s <= 1e9:
        raise ValueError("gb_per_s must be between 0.001 and 1e9")
    if pace.like and pace.like not in NAMED:
        raise ValueError(f"like must be one of {', '.join(NAMED)}")
    if pace.memory_bytes is not None and not (isinstance(pace.memory_bytes, int) and pace.memory_bytes > 0):
        raise ValueError("memory_bytes must be a whole number above 0")


PLACES = ("start", "backward", "sync", "call")


@dataclass(frozen=True)
class Slow:
    """Delays rank `rank` by `ms` in every step: before forward (start), when backward begins (backward), or before it
    hands over its last gradient (sync). call: before every collective for gradients or weights.
    """

    rank: int
    at: str
    ms: float


def parse_slow(text: str) -> Slow | None:
    """None for an empty text. Raises ValueError."""
    if not text:
        return None
    expected = f"expected rank:R,at:{'|'.join(PLACES)},ms:M, like rank:1,at:start,ms:50"
    parts = dict(part.partition(":")[::2] for part in text.split(","))
    if set(parts) != {"rank", "at", "ms"} or text.count(",") != 2 or parts["at"] not in PLACES:
        raise ValueError(f"{text!r}: {expected}")
    try:
        slow = Slow(rank=int(parts["rank"]), at=parts["at"], ms=float(parts["ms"]))
    except ValueError:
        raise ValueError(f"{text!r}: {expected}") from None
    if slow.rank < 0 or not math.isfinite(slow.ms) or not 0 < slow.ms <= 3_600_000:
        raise ValueError(f"{text!r}: the rank counts from 0, and 0 < ms <= 3600000")
    return slow
