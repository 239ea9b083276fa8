"""A job's place in the queue, from its hosts' answers (`remote/gpu_queue.py`), which are untrusted. Pure.

queue_of({"a": read_answer("a", answer), ...})       all waiting jobs in order
place_in({"a": agent.json, ...})                     words for the place of a queued job
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
    """silent: logins whose sockets look like tickets but gave no answer."""

    tickets: tuple[Rival, ...] = ()
    ahead: tuple[Rival, ...] = ()
    held: tuple[Rival, ...] = ()
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

    def words(self) -> str:
        """`place 2 in the queue, behind ada's job x-1 (has GPUs of a, b for 12m03s), bob's job y-1 (waits for 5m)`."""
        rivals = [f"{each.name} (has GPUs of {some(each.nodes, SHOWN)}{_for(each)})" for each in self.holders]
        rivals += [f"{each.name} (waits{_for(each)})" for each in reversed(self.before)]
        return f"place {self.place} in the queue, behind {some(rivals, SHOWN)}"


def _for(rival: Rival) -> str:
    return "" if rival.since_s is None else f" for {format_duration(rival.since_s)}"


def read_answer(node: str, answer: Mapping[str, Any]) -> HostAnswer:
    """Raises ValueError, TypeError, KeyError, AttributeError, OverflowError if malformed."""
    tickets, ahead, held = (
        tuple(_rival(node, row) for row in answer.get(rows, ())[:MOST]) for rows in ("tickets", "ahead", "held")
    )
    silent = tuple(one_line(login, 60) or "another login" for login in answer.get("silent", ())[:SHOWN])
    return HostAnswer(tickets, ahead, held, silent)


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


def place_in(records: Mapping[str, Mapping[str, Any]]) -> str:
    """From the job's supervisors' records (untrusted); "" if any place is unknown."""
    answers, more = dict[str, HostAnswer](), list[str]()
    for node, record in records.items():
        with suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError):
            shown = record["queue"]
            answers[node] = read_answer(node, shown)
            more += [f"{node}: {one_line(shown['occupied'], 120)}"] if shown["occupied"] else []
            more += [f"{node}: a socket of {login} gives no answer: passed over" for login in answers[node].silent]
    place = place_of(answers)
    if len(answers) < len(records):
        return ""
    return "; ".join([*([] if place.is_turn else [place.words()]), *more])


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
