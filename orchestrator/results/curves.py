"""Curves of a run: loss, evaluations, epochs, speed over time; and confidence intervals of its speed.

curves = read_curves(events)             # after `measure`, which adds the table `timed`
curves.loss[-1].loss, curves.evaluations[-1].accuracy, curves.epochs[-1].seconds
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError

from orchestrator.jobs.metric_lines import count, number
from orchestrator.planning.launch_plan import read_settings
from orchestrator.record import Record
from orchestrator.results.events import Events
from orchestrator.units import format_duration, format_percent
from trainer.shared.metrics import LARGEST

POINTS = 200
_EVENTS = 100_000

AnyPoint = TypeVar("AnyPoint")
Place = Callable[[int], float]
"""Maps an update's number to seconds, samples, or a position."""


class LossPoint(Record):
    """Mean over the samples since the point before, of ranks that report a loss."""

    step: int
    loss: float


class EvaluationPoint(Record):
    step: int
    accuracy: float | None = None
    """0..1."""
    loss: float | None = None
    """At least one of both is known."""


class Epoch(Record):
    epoch: int
    seconds: float
    """Without evaluation; for a resumed epoch since the `start` record."""
    loss: float | None = None
    """None in summaries of an older orch."""


class Moment(Record):
    """At the end of an update."""

    step: int
    seconds: float
    """Since the first update began, with evaluations and checkpoints."""
    samples: int
    """All ranks' samples so far."""


class Curves(Record):
    loss: tuple[LossPoint, ...] = ()
    updates_a_point: int = 1
    evaluations: tuple[EvaluationPoint, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    course: tuple[Moment, ...] = ()
    """Empty if no rank reports times, or from an older orch."""

    @property
    def epoch_words(self) -> str:
        """Needs at least one epoch."""
        seconds = [epoch.seconds for epoch in self.epochs]
        count, median = max(epoch.epoch for epoch in self.epochs) + 1, f"{statistics.median(seconds):.3g} s"
        if len(seconds) == 1:
            return f"{count}, the last in {median}" if count > 1 else f"1, in {median}"
        return f"{count}, {median} each ({min(seconds):.3g} to {max(seconds):.3g} s)"


def read_curves(events: Events) -> Curves:
    """All ranks report the same: the first with any counts. After a restart, a step's last report counts."""
    (steps,) = events.connection.execute("SELECT count(DISTINCT step) FROM timed WHERE complete").fetchone()
    rows = events.connection.execute(_LOSS, [max(1, min(POINTS, steps))]).fetchall()
    ends = [step for step, _ in rows]
    return Curves(
        loss=tuple(LossPoint(step=step, loss=loss) for step, loss in rows),
        updates_a_point=max((end - before for before, end in pairwise(ends)), default=1),
        evaluations=_thinned(sorted({each.step: each for each in _evaluations(events)}.items())),
        epochs=_thinned(sorted({each.epoch: each for each in _epochs(events)}.items())),
        course=tuple(_moments(events)),
    )


_LOSS = """
WITH whole AS (
    SELECT step, CASE WHEN sum(samples) > 0 THEN sum(loss) ELSE avg(loss) END AS loss, sum(samples) AS samples
    FROM timed WHERE complete AND has_loss GROUP BY step HAVING count(loss) = count(*)),
parts AS (SELECT *, ntile(?) OVER (ORDER BY step) AS part FROM whole)
SELECT max(step), CASE WHEN sum(samples) > 0 THEN sum(loss) / sum(samples) ELSE avg(loss) END
FROM parts GROUP BY part ORDER BY part
"""


# Hosts' clocks differ: only the first rank's counts.
_COURSE = """
WITH whole AS (SELECT step, sum(samples) AS samples FROM timed WHERE complete GROUP BY step),
own AS (
    SELECT step, any_value(wall) AS wall, any_value(t_ms) AS t_ms FROM timed
    WHERE rank = (SELECT min(rank) FROM timed) AND wall IS NOT NULL GROUP BY step),
seen AS (
    SELECT step, wall, sum(samples) OVER (ORDER BY step) AS samples,
           min(wall - coalesce(t_ms, 0) / 1000) OVER () AS began, ntile(?) OVER (ORDER BY step) AS part
    FROM whole JOIN own USING (step))
SELECT max(step), max(wall) - any_value(began), max(samples)::BIGINT FROM seen GROUP BY part ORDER BY part
"""


def _moments(events: Events) -> Iterator[Moment]:
    """Stops where time goes backward."""
    seconds_before = 0.0
    for step, seconds, samples in events.connection.execute(_COURSE, [POINTS]).fetchall():
        if seconds_before <= seconds < LARGEST:
            yield Moment(step=step, seconds=round(seconds, 3), samples=samples)
            seconds_before = seconds


def _evaluations(events: Events) -> Iterator[EvaluationPoint]:
    for event in _first_ranks(events, "eval"):
        step, accuracy, loss = count(event, "step"), number(event, "accuracy"), number(event, "loss")
        known = loss is not None if event.get("accuracy") is None else accuracy is not None and 0 <= accuracy <= 1
        if step is not None and known:
            yield EvaluationPoint(step=step, accuracy=accuracy, loss=loss)


def _epochs(events: Events) -> Iterator[Epoch]:
    for event in _first_ranks(events, "epoch"):
        epoch, seconds = count(event, "epoch"), number(event, "epoch_s")
        if epoch is not None and seconds is not None and seconds >= 0:
            yield Epoch(epoch=epoch, seconds=seconds, loss=number(event, "loss"))


def _first_ranks(events: Events, event: str) -> list[dict[str, object]]:
    ranks = events.latest(event)
    return events.of_rank(min(ranks), event, _EVENTS) if ranks else []


def _thinned(by_number: Sequence[tuple[int, AnyPoint]]) -> tuple[AnyPoint, ...]:
    """At most POINTS, evenly spaced, including the last."""
    every = -(-len(by_number) // POINTS) or 1
    return tuple(each for _, each in by_number[::-1][::every][::-1])


def placed(course: Sequence[Moment], values: Sequence[float]) -> Place:
    """Linear between two moments, constant outside."""
    steps = [moment.step for moment in course]

    def place(step: int) -> float:
        after = bisect.bisect_left(steps, step)
        if after == 0 or after == len(steps):
            return values[min(after, len(steps) - 1)]
        part = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return values[after - 1] + part * (values[after] - values[after - 1])

    return place


# Speed of each host over the run, and marks of events.
#
#     course = read_speed_course(events)             # after `measure`
#     course.hosts[0].samples_per_s[-1], course.marks[0].what
#
# Per stretch of equally many measured steps. All ranks meet in every step, so a stretch takes as long as its slowest
# rank. Only durations are used, since hosts' clocks differ.

SPEED_POINTS = 100
STEPS_A_POINT = 4
"""Single steps jitter."""
MARKS = 50
"""Per kind; the last ones are kept."""
_READ = 100_000
Happened = Literal["rebalance", "eval", "checkpoint"]
KINDS: tuple[Happened, ...] = ("rebalance", "eval", "checkpoint")
TOGETHER = "all hosts"


class HostCourse(Record):
    name: str
    """`all hosts` if each sample passes all of them."""
    samples_per_s: tuple[float, ...]
    """By stretch."""


class HappenedAt(Record):
    what: Happened
    step: int
    """The update before; for a rebalance the first with the new shares."""


class SpeedCourse(Record):
    steps: tuple[int, ...] = ()
    """The last of each stretch."""
    hosts: tuple[HostCourse, ...] = ()
    marks: tuple[HappenedAt, ...] = ()


def read_speed_course(events: Events, *, apart: bool = False) -> SpeedCourse:
    """apart: each rank trained by itself, so that only its own steps count."""
    query = events.connection.execute
    (measured,) = query("SELECT count(DISTINCT step) FROM timed WHERE measured").fetchone()
    cut = any(number(start, "work") is not None for start in events.latest("start").values())
    stretches = max(1, min(SPEED_POINTS, measured // STEPS_A_POINT))
    rows = query(_STRETCHES, [stretches, TOGETHER if cut else None, apart]).fetchall()
    speeds: dict[str, list[float]] = {}
    for _, name, speed in rows:
        speeds.setdefault(name, []).append(speed)
    steps = tuple(dict.fromkeys(step for step, _, _ in rows))
    if len(steps) < 2:
        return SpeedCourse()
    hosts = tuple(HostCourse(name=name, samples_per_s=tuple(of)) for name, of in speeds.items())
    return SpeedCourse(steps=steps, hosts=hosts, marks=tuple(_marks(events, steps[-1])))


def _marks(events: Events, last: int) -> Iterator[HappenedAt]:
    """All ranks report the same, checkpoints only the first."""
    for what in KINDS:
        ranks = events.latest(what)
        read = events.of_rank(min(ranks), what, _READ) if ranks else []
        found = {step for event in read if (step := count(event, "step")) is not None and step <= last}
        yield from (HappenedAt(what=what, step=step) for step in sorted(found)[-MARKS:])


_STRETCHES = """
WITH clock AS (
    SELECT rank FROM timed WHERE measured GROUP BY rank ORDER BY sum(t_ms) DESC, rank LIMIT 1),
parts AS (
    SELECT step, t_ms, ntile(?) OVER (ORDER BY step) AS part FROM timed JOIN clock USING (rank) WHERE measured),
times AS (SELECT part, max(step) AS step, sum(t_ms) AS ms FROM parts GROUP BY part HAVING sum(t_ms) > 0),
work AS (
    SELECT part, coalesce(?, node) AS name, sum(samples) AS samples, min(rank) AS first,
        sum(timed.t_ms) / count(DISTINCT rank) AS own_ms
    FROM timed JOIN parts USING (step) WHERE measured GROUP BY part, name)
SELECT step, name, 1000 * samples / CASE WHEN ? THEN own_ms ELSE ms END
FROM times JOIN work USING (part) ORDER BY step, first
"""


# Confidence interval of a run's speed, from its own steps. Pure.
#
#     speed = Steps((64, 64, ...), (12.1, 11.9, ...))     samples and milliseconds of each step
#     interval(speed)                                     Interval(value=5310.2, low=5274.9, high=5342.0), samples/s
#     ratio(speed, other)                                 the second speed over the first
#
# Neighbouring steps are alike (a busy minute, a hot GPU), so drawing single steps would give a far too narrow
# interval. Blocks of neighbours are drawn instead, also around the end: the circular block bootstrap (Politis and
# Romano 1992). A run is cut into few blocks, as in the method of batch means (10 to 30, Schmeiser 1982), so that slow
# changes stay inside a block; into fewer if neighbouring blocks are still alike.

BLOCKS = {20: 1.10, 10: 1.22, 5: 1.58}
"""Blocks -> widening of the interval: n blocks vary less than their source, by the root of (n-1)/n, and have the tails
of Student's t, 2.09, 2.26 and 2.78 instead of 1.96.
"""
LEAST_STEPS = 20
DRAWN = 1000
INSIDE = 0.95


class Interval(Record):
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Steps:
    """samples: of all ranks. ms: of one rank that met the others in every step."""

    samples: Sequence[float]
    ms: Sequence[float]

    @property
    def samples_per_s(self) -> float:
        return 1000 * sum(self.samples) / sum(self.ms)

    @property
    def are_enough(self) -> bool:
        """Samples are 0 if they are not counted, as in a script without a loader."""
        return len(self.ms) >= LEAST_STEPS and all(self.samples)


def interval(of: Steps) -> Interval | None:
    """Samples/s. None with too few steps, or unknown samples."""
    if not of.are_enough:
        return None
    blocks = _blocks(of)
    return _around(of.samples_per_s, _drawn(of, blocks, seed=1), BLOCKS[blocks])


def ratio(first: Steps, second: Steps) -> Interval | None:
    """second / first. None with too few steps, or unknown samples."""
    if not (first.are_enough and second.are_enough):
        return None
    blocks = [_blocks(steps) for steps in (first, second)]
    one, two = _drawn(first, blocks[0], seed=1), _drawn(second, blocks[1], seed=2)
    drawn = [later / earlier for earlier, later in zip(one, two, strict=True)]
    return _around(second.samples_per_s / first.samples_per_s, drawn, BLOCKS[min(blocks)])


def _blocks(of: Steps) -> int:
    """The most blocks whose neighbours are not visibly alike, else the fewest."""
    for blocks in BLOCKS:
        if _likeness(_speeds(of, blocks)) <= 1 / math.sqrt(blocks):
            return blocks
    return min(BLOCKS)


def _speeds(of: Steps, blocks: int) -> list[float]:
    ends = [number * len(of.ms) // blocks for number in range(blocks + 1)]
    return [Steps(of.samples[a:b], of.ms[a:b]).samples_per_s for a, b in itertools.pairwise(ends)]


def _likeness(values: Sequence[float]) -> float:
    """About 0 if neighbours are independent, with a spread of 1/sqrt(n)."""
    mean = statistics.fmean(values)
    apart = [value - mean for value in values]
    square = sum(each * each for each in apart)
    return sum(a * b for a, b in itertools.pairwise(apart)) / square if square else 0.0


def _drawn(of: Steps, blocks: int, seed: int) -> list[float]:
    """Speeds of equally plausible runs."""
    draw = random.Random(seed)  # noqa: S311 - repeatable: the same runs always have the same interval
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


# The target accuracy of a run, and when it was reached, from the ranks' `target` event.
#
#     read_target(events)     AccuracyTarget(asked=0.99, reached=Reached(accuracy=0.9912, step=3751, ...))

Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=1 << 60)]


class Reached(Record):
    accuracy: Ratio
    step: Count
    """The update before, from 0."""
    epoch: Count
    samples: Count
    total_s: Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
    """Since the start of the process, which may have resumed."""


class AccuracyTarget(Record):
    asked: Ratio
    reached: Reached | None = None

    @property
    def words(self) -> str:
        asked = format_percent(self.asked, 2)
        if not self.reached:
            return f"{asked} not reached"
        found = self.reached
        return (
            f"{asked} reached ({format_percent(found.accuracy, 2)}) after {format_duration(found.total_s)}, "
            f"{found.step + 1:,} updates, {found.samples:,} samples, in epoch {found.epoch + 1}"
        )


def read_target(events: Events) -> AccuracyTarget | None:
    """None without a target."""
    start = next(iter(events.latest("start").values()), {})
    asked = read_settings(start.get("settings")).target_accuracy
    if not asked or not 0 < asked <= 1:
        return None
    for event in events.latest("target").values():
        try:
            return AccuracyTarget(asked=asked, reached=Reached.model_validate(event))
        except ValidationError:
            continue
    return AccuracyTarget(asked=asked)
