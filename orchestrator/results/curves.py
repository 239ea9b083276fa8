"""How a run learned: its loss over the updates, and what each epoch and evaluation reported.

    curves = read_curves(events)             # after `measure`
    curves.loss[-1].loss, curves.evaluations[-1].accuracy, curves.epochs[-1].seconds

At most POINTS of each are kept. Both tables have to be there: `steps` of `read_events`, `timed` of `measure`.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from orchestrator.jobs.metric_lines import count, number
from orchestrator.record import Record
from orchestrator.results.events import Events
from trainer.shared.metrics import LARGEST

POINTS = 200
_EVENTS = 100_000
"""The most events of one name that are read from a rank's file."""

AnyPoint = TypeVar("AnyPoint")
Place = Callable[[int], float]
"""Where an update lies among others, by its number: in seconds, in samples, on an axis."""


class LossPoint(Record):
    """The mean over all samples of the updates since the point before, of the ranks that tell their loss."""

    step: int
    """The last of these updates."""
    loss: float


class EvaluationPoint(Record):
    """What the network reached after an update."""

    step: int
    accuracy: float | None = None
    """0..1."""
    loss: float | None = None
    """The mean over the test data. One of both is known."""


class Epoch(Record):
    """How long an epoch took."""

    epoch: int
    seconds: float
    """The time of its updates, evaluation left out; since the `start` record for an epoch that was resumed."""
    loss: float | None = None
    """The mean over its samples, of all ranks; summaries of an older orch have none."""


class Moment(Record):
    """How far the run was when an update was over."""

    step: int
    seconds: float
    """Since its first update began, by the clock of one host; evaluations and checkpoints count."""
    samples: int
    """All ranks', of this update and all before."""


class Curves(Record):
    loss: tuple[LossPoint, ...] = ()
    updates_a_point: int = 1
    """The most that a point of the loss is the mean of."""
    evaluations: tuple[EvaluationPoint, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    course: tuple[Moment, ...] = ()
    """Empty where no rank says when its updates were over; summaries of an older orch have none."""

    @property
    def epoch_words(self) -> str:
        """How many, and how long each took: the median and the range. There has to be one."""
        seconds = [epoch.seconds for epoch in self.epochs]
        count, median = max(epoch.epoch for epoch in self.epochs) + 1, f"{statistics.median(seconds):.3g} s"
        if len(seconds) == 1:
            return f"{count}, the last in {median}" if count > 1 else f"1, in {median}"
        return f"{count}, {median} each ({min(seconds):.3g} to {max(seconds):.3g} s)"


def read_curves(events: Events) -> Curves:
    """Every rank reports the same epochs and evaluations: the first rank that has any counts. Of a step that was taken
    more than once, after a new start, the last one counts.
    """
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
    SELECT step, sum(loss) AS loss, sum(samples) AS samples FROM timed WHERE complete AND tells_loss
    GROUP BY step HAVING count(loss) = count(*) AND sum(samples) > 0),
parts AS (SELECT *, ntile(?) OVER (ORDER BY step) AS part FROM whole)
SELECT max(step), sum(loss) / sum(samples) FROM parts GROUP BY part ORDER BY part
"""


# Hosts' clocks differ: the first rank's alone says when an update was over.
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
    """As far as time goes forward in them."""
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
    """At most POINTS of them, evenly, the last one among them."""
    every = -(-len(by_number) // POINTS) or 1
    return tuple(each for _, each in by_number[::-1][::every][::-1])


def placed(course: Sequence[Moment], values: Sequence[float]) -> Place:
    """Between two moments in proportion to the updates; before the first and behind the last, as these."""
    steps = [moment.step for moment in course]

    def place(step: int) -> float:
        after = bisect.bisect_left(steps, step)
        if after == 0 or after == len(steps):
            return values[min(after, len(steps) - 1)]
        part = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return values[after - 1] + part * (values[after] - values[after - 1])

    return place
