"""How fast each host was in the course of a run, and what happened meanwhile.

    course = read_speed_course(events)             # after `measure`
    course.hosts[0].samples_per_s[-1], course.marks[0].what

Over the measured steps, in stretches of equally many. All ranks meet in every step, so a stretch takes as long on each:
what its slowest rank takes. Durations alone, as everywhere; clocks of different hosts are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from orchestrator.jobs.metric_lines import count, number
from orchestrator.record import Record
from orchestrator.results.events import Events

POINTS = 100
STEPS_A_POINT = 4
"""At least so many: single steps jitter."""
MARKS = 50
"""The most marks of a kind; of more of them the last ones are kept."""
_READ = 100_000
Happened = Literal["rebalance", "eval", "checkpoint"]
KINDS: tuple[Happened, ...] = ("rebalance", "eval", "checkpoint")
TOGETHER = "all hosts"


class HostCourse(Record):
    name: str
    """`all hosts` where each sample passes all of them."""
    samples_per_s: tuple[float, ...]
    """One for each stretch."""


class HappenedAt(Record):
    what: Happened
    step: int
    """After which update; of a rebalance the first with the new shares."""


class SpeedCourse(Record):
    steps: tuple[int, ...] = ()
    """The last step of each stretch."""
    hosts: tuple[HostCourse, ...] = ()
    marks: tuple[HappenedAt, ...] = ()


def read_speed_course(events: Events) -> SpeedCourse:
    query = events.connection.execute
    (measured,) = query("SELECT count(DISTINCT step) FROM timed WHERE measured").fetchone()
    cut = any(number(start, "work") is not None for start in events.latest("start").values())
    rows = query(_STRETCHES, [max(1, min(POINTS, measured // STEPS_A_POINT)), TOGETHER if cut else None]).fetchall()
    speeds: dict[str, list[float]] = {}
    for _, name, speed in rows:
        speeds.setdefault(name, []).append(speed)
    steps = tuple(dict.fromkeys(step for step, _, _ in rows))
    if len(steps) < 2:
        return SpeedCourse()
    hosts = tuple(HostCourse(name=name, samples_per_s=tuple(of)) for name, of in speeds.items())
    return SpeedCourse(steps=steps, hosts=hosts, marks=tuple(_marks(events, steps[-1])))


def _marks(events: Events, last: int) -> Iterator[HappenedAt]:
    """Every rank reports the same, of checkpoints the first alone: the first rank that has any counts."""
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
    SELECT part, coalesce(?, node) AS name, sum(samples) AS samples, min(rank) AS first
    FROM timed JOIN parts USING (step) WHERE measured GROUP BY part, name)
SELECT step, name, 1000 * samples / ms FROM times JOIN work USING (part) ORDER BY step, first
"""
