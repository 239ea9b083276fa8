"""How far chance alone could move a run's speed, from its own steps. Pure.

    speed = Steps((64, 64, ...), (12.1, 11.9, ...))     samples and milliseconds of each step, in their order
    interval(speed)                                     Interval(value=5310.2, low=5274.9, high=5342.0), samples/s
    ratio(speed, other)                                 the second one's speed over the first one's

Neighbouring steps are alike (a busy minute, a hot GPU), so that steps drawn one by one would promise far too narrow an
interval. Whole blocks of neighbours are drawn, around the end as well: the circular block bootstrap (Politis and Romano
1992). A run is cut into few blocks, as many as the method of batch means takes (10 to 30, Schmeiser 1982), so that what
comes and goes slowly is inside a block; and into fewer where neighbouring blocks are still alike.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from orchestrator.record import Record

BLOCKS = {20: 1.10, 10: 1.22, 5: 1.58}
"""Into how many a run may be cut, and how much wider its interval is then: n of them vary less than what they were
drawn from, by the root of (n-1)/n, and have the tails of Student's t, 2.09, 2.26 and 2.78 for 1.96.
"""
LEAST_STEPS = 20
"""With fewer there is no interval."""
DRAWN = 1000
INSIDE = 0.95
"""An interval holds so much of what was drawn."""


class Interval(Record):
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Steps:
    """samples: of all ranks. ms: by the clock of one rank that met the others in every step."""

    samples: Sequence[float]
    ms: Sequence[float]

    @property
    def samples_per_s(self) -> float:
        return 1000 * sum(self.samples) / sum(self.ms)


def interval(of: Steps) -> Interval | None:
    """Samples/s. None where there are too few steps."""
    if len(of.ms) < LEAST_STEPS:
        return None
    blocks = _blocks(of)
    return _around(of.samples_per_s, _drawn(of, blocks, seed=1), BLOCKS[blocks])


def ratio(first: Steps, second: Steps) -> Interval | None:
    """The second one's speed over the first one's. None where one has too few steps."""
    if min(len(first.ms), len(second.ms)) < LEAST_STEPS:
        return None
    blocks = [_blocks(steps) for steps in (first, second)]
    one, two = _drawn(first, blocks[0], seed=1), _drawn(second, blocks[1], seed=2)
    drawn = [later / earlier for earlier, later in zip(one, two, strict=True)]
    return _around(second.samples_per_s / first.samples_per_s, drawn, BLOCKS[min(blocks)])


def _blocks(of: Steps) -> int:
    """The most blocks of which neighbours are not visibly alike; where they always are, the fewest."""
    for blocks in BLOCKS:
        if _likeness(_speeds(of, blocks)) <= 1 / math.sqrt(blocks):
            return blocks
    return min(BLOCKS)


def _speeds(of: Steps, blocks: int) -> list[float]:
    """Of each block of steps, one after the other."""
    ends = [number * len(of.ms) // blocks for number in range(blocks + 1)]
    return [Steps(of.samples[a:b], of.ms[a:b]).samples_per_s for a, b in itertools.pairwise(ends)]


def _likeness(values: Sequence[float]) -> float:
    """The correlation between neighbours: about 0 where there is none, with a spread of 1/sqrt(n)."""
    mean = statistics.fmean(values)
    apart = [value - mean for value in values]
    square = sum(each * each for each in apart)
    return sum(a * b for a, b in itertools.pairwise(apart)) / square if square else 0.0


def _drawn(of: Steps, blocks: int, seed: int) -> list[float]:
    """Speeds of runs that could as well have been: as many blocks, each of them at a place drawn at random."""
    draw = random.Random(seed)  # noqa: S311 - the same runs have the same interval, whenever they are compared
    count = len(of.ms)
    length = -(-count // blocks)
    samples, ms = (list(accumulate([*values, *values[:length]], initial=0.0)) for values in (of.samples, of.ms))
    speeds = []
    for _ in range(DRAWN):
        places = [draw.randrange(count) for _ in range(-(-count // length))]
        total_ms = sum(ms[place + length] - ms[place] for place in places)
        speeds.append(1000 * sum(samples[place + length] - samples[place] for place in places) / total_ms)
    return speeds


def _around(value: float, drawn: Sequence[float], wider: float) -> Interval:
    ordered = sorted(drawn)
    outside = round(len(ordered) * (1 - INSIDE) / 2)
    low, high = ordered[outside], ordered[-1 - outside]
    return Interval(value=value, low=value - wider * max(0.0, value - low), high=value + wider * max(0.0, high - value))
