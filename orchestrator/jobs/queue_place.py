"""A job's place in the queue, from its hosts' answers (`remote/gpu_queue.py`), which are untrusted. Pure.

place_of({"a": read_answer("a", answer), ...})       PlaceInQueue(holders=(...), before=(...))
queue_of({"a": ..., "b": ...})                       all waiting jobs in order
place_in({"a": agent.json, ...})                     of a job that its supervisors wait for
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from orchestrator.units import format_duration, one_line, some

MOST = 4096
MOST_NUMBER = (1 << 53) - 1  # as in remote/gpu_queue.py
FIRST = {"high": 1, "normal": 1 << 51, "low": 1 << 52}  # as there
SHOWN = 3


@dataclass(frozen=True)
class Rival:
    """since_s: None if unknown. number: of its ticket; 0 if it has GPUs."""

    job: str
    user: str = ""
    since_s: float | None = None
    nodes: tuple[str, ...] = ()
    number: int = 0

    @property
    def name(self) -> str:
        return f"{self.user}'s job {self.job}" if self.user else f"job {self.job}" if self.job else "another job"


@dataclass(frozen=True)
class HostAnswer:
    """lost: the host has no ticket of the job. silent: logins whose sockets look like tickets but gave no answer."""

    tickets: tuple[Rival, ...] = ()
    ahead: tuple[Rival, ...] = ()
    held: tuple[Rival, ...] = ()
    lost: bool = False
    cancelled: bool = False
    silent: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlaceInQueue:
    """holders: jobs with the GPUs. before: jobs ahead of it."""

    holders: tuple[Rival, ...] = ()
    before: tuple[Rival, ...] = ()

    @property
    def place(self) -> int:
        return 1 + len(self.before)

    @property
    def is_turn(self) -> bool:
        return not self.holders and not self.before

    @property
    def behind(self) -> frozenset[tuple[str, int, tuple[str, ...]]]:
        """A change of this is reported. It has the holders' hosts: a starting job has GPUs on only some of them."""
        holders = {(rival.job, 0, rival.nodes) for rival in self.holders}
        return frozenset(holders | {(rival.job, rival.number, ()) for rival in self.before})

    def words(self) -> str:
        """`place 2 in the queue, behind ada's job x-1 (has GPUs of a, b for 12m03s), bob's job y-1 (waits for 5m)`."""
        rivals = [f"{each.name} (has GPUs of {some(each.nodes, SHOWN)}{_for(each)})" for each in self.holders]
        rivals += [f"{each.name} (waits{_for(each)})" for each in reversed(self.before)]
        return f"place {self.place} in the queue, behind {some(rivals, SHOWN)}"


def _for(rival: Rival) -> str:
    return "" if rival.since_s is None else f" for {format_duration(rival.since_s)}"


def read_answer(node: str, answer: Mapping[str, Any]) -> HostAnswer:
    """Raises ValueError, TypeError, KeyError, AttributeError if malformed."""
    if answer.get("lost") is True:
        return HostAnswer(lost=True)
    tickets, ahead, held = (
        tuple(_rival(node, row) for row in answer[rows][:MOST]) for rows in ("tickets", "ahead", "held")
    )
    silent = tuple(one_line(login, 60) for login in answer.get("silent", ())[:SHOWN])
    return HostAnswer(tickets, ahead, held, cancelled=answer.get("cancelled") is True, silent=silent)


def _rival(node: str, row: Mapping[str, Any]) -> Rival:
    since_s, number = row.get("since_s"), int(row.get("number", 0))
    if since_s is not None and not (math.isfinite(since_s) and since_s >= 0):
        since_s = None
    if not 0 <= number <= MOST_NUMBER:
        raise ValueError(f"number {number}")
    return Rival(one_line(row["job"], 120), one_line(row["user"], 60), since_s, (node,), number)


def place_of(answers: Mapping[str, HostAnswer]) -> PlaceInQueue:
    holders = _by_job(rival for answer in answers.values() for rival in answer.held)
    started = {rival.job for rival in holders}  # a job keeps its tickets until all its hosts have started it
    before = _in_order(rival for answer in answers.values() for rival in answer.ahead if rival.job not in started)
    return PlaceInQueue(tuple(holders), tuple(before))


def number_after(numbers: Iterable[int], priority: str = "normal") -> int:
    """As in `remote/gpu_queue.py`."""
    first = FIRST[priority]
    last = min((start for start in FIRST.values() if start > first), default=MOST_NUMBER + 1) - 1
    return min(last, max(first, 1 + max((number for number in numbers if number <= last), default=0)))


def place_in(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The place of a job that waits without a controller, from its supervisors' records (untrusted); "" if unknown."""
    answers, occupied = dict[str, HostAnswer](), list[str]()
    for node, record in records.items():
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            shown = record["queue"]
            answers[node] = read_answer(node, {"tickets": [], "ahead": shown["ahead"], "held": shown["held"]})
            occupied += [f"{node}: {one_line(shown['occupied'], 120)}"] if shown["occupied"] else []
    place = place_of(answers)
    if not answers or place.is_turn:
        return "; ".join(occupied)
    return place.words()


def queue_of(answers: Mapping[str, HostAnswer]) -> tuple[Rival, ...]:
    return tuple(_in_order(rival for answer in answers.values() for rival in answer.tickets))


def _in_order(rivals: Iterable[Rival]) -> list[Rival]:
    return sorted(_by_job(rivals), key=lambda rival: (rival.number, rival.job))


def _by_job(rivals: Iterable[Rival]) -> list[Rival]:
    rows: dict[str, list[Rival]] = {}
    for rival in rivals:
        rows.setdefault(rival.job, []).append(rival)
    return [reduce(_joined, several) for several in rows.values()]


def _joined(one: Rival, other: Rival) -> Rival:
    nodes = tuple(sorted({*one.nodes, *other.nodes}))
    since_s = max((each.since_s for each in (one, other) if each.since_s is not None), default=None)
    return replace(one, nodes=nodes, since_s=since_s, number=max(one.number, other.number))
