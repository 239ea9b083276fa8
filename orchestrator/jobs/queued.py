"""Where a job that waits stands in the queue for its GPUs, from its hosts' answers (`remote/waiting.py`). Pure.

standing_of({"a": read_answer("a", said), ...})      PlaceInQueue(holders=(...), before=(...), ...)
queue_of({"a": ..., "b": ...})                       everybody who waits there, in their order
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from orchestrator.text import one_line, some
from orchestrator.units import format_duration

MOST = 4096
"""Rows that one host may report."""
SHOWN = 3
_ROWS = ("tickets", "ahead", "held")


@dataclass(frozen=True)
class Rival:
    """A job that has GPUs, or waits for them. number: of its ticket, 0 for one that has them. starts_s: in so many
    seconds at the latest it starts. over_s: and is over. None where nobody knows.
    """

    job: str
    user: str = ""
    since_s: float | None = None
    nodes: tuple[str, ...] = ()
    number: int = 0
    starts_s: float | None = None
    over_s: float | None = None

    @property
    def name(self) -> str:
        return f"{self.user}'s job {self.job}" if self.user else f"job {self.job}" if self.job else "another job"


@dataclass(frozen=True)
class HostAnswer:
    """What one host says. goes_past: if this job started now, it would be in the way of none of those ahead. lost: the
    host has no ticket of it. silent: logins whose sockets there look like tickets and give no answer.
    """

    tickets: tuple[Rival, ...] = ()
    ahead: tuple[Rival, ...] = ()
    held: tuple[Rival, ...] = ()
    goes_past: bool = True
    lost: bool = False
    cancelled: bool = False
    silent: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlaceInQueue:
    """holders: who has the GPUs. before: who waits for them and came earlier. goes_past: and is not delayed by a start
    now. starts_s: in so many seconds the GPUs are this job's at the latest; None where nobody knows.
    """

    holders: tuple[Rival, ...] = ()
    before: tuple[Rival, ...] = ()
    goes_past: bool = False
    starts_s: float | None = 0.0

    @property
    def place(self) -> int:
        return 1 + len(self.before)

    @property
    def is_turn(self) -> bool:
        return not self.holders and (self.goes_past or not self.before)

    @property
    def behind(self) -> frozenset[tuple[str, int, tuple[str, ...]]]:
        """What of it is worth another line when it changes: who has GPUs of which hosts, too, since a job that is seen
        while it starts has those of some of its hosts.
        """
        has = {(rival.job, 0, rival.nodes) for rival in self.holders}
        return frozenset(has | {(rival.job, rival.number, ()) for rival in self.before})

    def words(self) -> str:
        """`place 2, behind alice's job mnist-1 (has GPUs of a, b; for 12m03s) and bob's job x-1 (waits, too)`."""
        rivals = [f"{each.name} (has GPUs of {_where(each)})" for each in self.holders]
        rivals += [f"{each.name} (waits{_for(each)})" for each in reversed(self.before)]
        return f"place {self.place} in the queue, behind {some(rivals, SHOWN)}"


def promised(before: float | None, asked_at: float, starts_s: float | None, longest_s: float | None) -> float | None:
    """The moment by which a job that waits is to have started: others may go past it that are over by then. None where
    nobody knows.

    It may have to wait as long again as it takes, so that more of them can; but a promise stays as it is: one that is
    put off is none, and hosts that have not heard of an earlier moment yet let others go past it. asked_at: when its
    hosts said starts_s, or earlier. before: what was promised until now.
    """
    if before is not None or starts_s is None:
        return before
    return asked_at + starts_s + (longest_s or 0.0)


def _where(rival: Rival) -> str:
    return some(rival.nodes, SHOWN) + _for(rival)


def _for(rival: Rival) -> str:
    return "" if rival.since_s is None else f" for {format_duration(rival.since_s)}"


def read_answer(node: str, said: Mapping[str, Any]) -> HostAnswer:
    """Raises ValueError, TypeError, KeyError, AttributeError for what a host would not say."""
    if said.get("lost") is True:
        return HostAnswer(lost=True)
    tickets, ahead, held = (tuple(_rival(node, row) for row in said[rows][:MOST]) for rows in _ROWS)
    goes_past, cancelled = (said.get(name) is True for name in ("goes_past", "cancelled"))
    silent = tuple(one_line(login, 60) for login in said.get("silent", ())[:SHOWN])
    return HostAnswer(tickets, ahead, held, goes_past, cancelled=cancelled, silent=silent)


def _rival(node: str, row: Mapping[str, Any]) -> Rival:
    names = ("since_s", "left_s", "starts_s", "longest_s")
    since_s, left_s, starts_s, longest_s = (_seconds(row.get(name)) for name in names)
    over_s = left_s if starts_s is None or longest_s is None else starts_s + longest_s
    number = int(row.get("number", 0))
    if not 0 <= number < 1 << 53:
        raise ValueError(f"number {number}")
    return Rival(one_line(row["job"], 120), one_line(row["user"], 60), since_s, (node,), number, starts_s, over_s)


def _seconds(said: Any) -> float | None:
    """None for what is no length of time. Raises TypeError."""
    return said if said is not None and math.isfinite(said) and said >= 0 else None


def standing_of(answers: Mapping[str, HostAnswer]) -> PlaceInQueue:
    holders = _by_job(rival for answer in answers.values() for rival in answer.held)
    started = {rival.job for rival in holders}  # its tickets go when all its hosts have started it
    before = _in_order(rival for answer in answers.values() for rival in answer.ahead if rival.job not in started)
    over_s = [rival.over_s for answer in answers.values() for rival in (*answer.held, *answer.ahead)]
    starts_s = None if None in over_s else max([0.0, *filter(None, over_s)])
    return PlaceInQueue(tuple(holders), tuple(before), all(answer.goes_past for answer in answers.values()), starts_s)


def queue_of(answers: Mapping[str, HostAnswer]) -> tuple[Rival, ...]:
    return tuple(_in_order(rival for answer in answers.values() for rival in answer.tickets))


def _in_order(rivals: Iterable[Rival]) -> list[Rival]:
    return sorted(_by_job(rivals), key=lambda rival: (rival.number, rival.job))


def _by_job(rivals: Iterable[Rival]) -> list[Rival]:
    """One a job, with all its nodes."""
    found: dict[str, list[Rival]] = {}
    for rival in rivals:
        found.setdefault(rival.job, []).append(rival)
    return [reduce(_joined, several) for several in found.values()]


def _joined(one: Rival, other: Rival) -> Rival:
    nodes = tuple(sorted({*one.nodes, *other.nodes}))
    since_s, starts_s = (_longer(getattr(one, name), getattr(other, name)) for name in ("since_s", "starts_s"))
    return replace(one, nodes=nodes, since_s=since_s, number=max(one.number, other.number), starts_s=starts_s)


def _longer(one: float | None, other: float | None) -> float | None:
    return max((each for each in (one, other) if each is not None), default=None)
