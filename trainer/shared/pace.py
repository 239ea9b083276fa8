"""How fast a rank is that stands in for a GPU which is not here. Imports no torch.

    >>> pace = read_pace('{"samples_per_s": 333, "fixed_ms": 2}')
    >>> round(pace.step_s(samples=128, step=0), 3)      # forward, backward and the optimiser
    0.386

The launcher hands it over as ORCH_PACED, from `paced` in the inventory.
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
"""How a step's time divides. Backward computes two products a layer where forward computes one; the optimiser of
ResNet-152 moves 1.2 GB, 1.3 ms of a V100's 154 ms at 900 GB/s."""


@dataclass(frozen=True)
class Pace:
    """The speed of the GPU that a rank stands in for."""

    samples_per_s: float
    fixed_ms: float = 0.0
    jitter: float = 0.0
    memory_bytes: int | None = None
    slowdown: tuple[tuple[int, float], ...] = ()
    """(step, factor) pairs in the order of their steps: from that one on, all take factor times as long."""
    gb_per_s: float = GB_PER_S
    """The GPU's memory bandwidth, at which it does what lies beside its steps (`gpu_work`)."""
    like: str = ""
    """The experiment whose network the rank stands in for, while the run's own, a smaller one, learns within its time;
    empty: the run's own is stood in for, and nobody learns.
    """

    def step_s(self, samples: int, step: int, seed: object = 0) -> float:
        """Seconds that a whole step takes with so many samples. seed: two ranks with one seed jitter alike."""
        return self.part_s(samples, step, seed, work=1, kernels=1)

    def part_s(self, samples: int, step: int, seed: object, *, work: float, kernels: float) -> float:
        """The same of a part of the network. work, kernels: its parts of the multiplications, and of the layers whose
        kernels have to be started, which is what the fixed time goes into (18 us each: gpu_work.KERNEL_S).
        """
        factor = 1.0
        for at_step, slower in self.slowdown:
            if step >= at_step:
                factor = slower
        if self.jitter:
            factor *= 1 + self.jitter * random.Random(f"{seed}/{step}").uniform(-1, 1)  # noqa: S311, no secret
        return factor * (kernels * self.fixed_ms / 1000 + work * samples / self.samples_per_s)


def no_pace_for(name: str) -> TrainError:
    """A network that is no experiment's: nobody knows how fast the GPU trains it."""
    return TrainError(
        f"paced hosts run only experiments, not {name}; use --exp, or leave `paced:` out of the inventory"
    )


def read_pace(text: str) -> Pace:
    """Raises TrainError where the text is not what the launcher writes."""
    try:
        given: dict[str, Any] = json.loads(text)
        changes = sorted((int(one["at_step"]), float(one["factor"])) for one in given.pop("slowdown", ()))
        pace = Pace(**{name: value for name, value in given.items() if value is not None}, slowdown=tuple(changes))
        _check(pace)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise TrainError(
            f"ORCH_PACED is {text[:200]!r} ({error}); expected a JSON object like "
            '{"samples_per_s": 333, "fixed_ms": 0, "jitter": 0, "slowdown": [{"at_step": 100, "factor": 2}]}'
        ) from error
    return pace


def _check(pace: Pace) -> None:
    """Raises ValueError or TypeError. The bounds are so wide that only a mistake lies beyond, and no sum overflows."""
    speeds = [pace.samples_per_s, *(factor for _, factor in pace.slowdown)]
    if not all(1e-6 <= speed <= 1e12 for speed in speeds):
        raise ValueError("samples_per_s and factors lie between 1e-6 and 1e12")
    if not 0 <= pace.fixed_ms <= 3_600_000 or not 0 <= pace.jitter <= 1:
        raise ValueError("fixed_ms lies between 0 and 3600000, jitter between 0 and 1")
    if not 1e-3 <= pace.gb_per_s <= 1e9:
        raise ValueError("gb_per_s lies between 0.001 and 1e9")
    if pace.like and pace.like not in NAMED:
        raise ValueError(f"like is one of {', '.join(NAMED)}")
    if pace.memory_bytes is not None and not (isinstance(pace.memory_bytes, int) and pace.memory_bytes > 0):
        raise ValueError("memory_bytes is a whole number above 0")


# A bottleneck made on purpose, to see that the figures find it. Imports no torch.
#
# >>> parse_slow("rank:1,at:sync,ms:50")
# Slow(rank=1, at='sync', ms=50.0)

PLACES = ("start", "backward", "sync", "call")


@dataclass(frozen=True)
class Slow:
    """Rank `rank` stands still for `ms` in every step: before forward (start), as backward begins (backward), or when
    its last gradient is ready and not yet handed over (sync); or before every call of a collective that takes part in
    the exchange of gradients or weights (call): once a parameter with allreduce, once a bucket with ddp.
    """

    rank: int
    at: str
    ms: float


def parse_slow(text: str) -> Slow | None:
    """None for an empty text. Raises ValueError saying the form expected."""
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
