"""Who waits is promised when the GPUs are its own at the latest, and others go past it only where that stays true: with
the hosts' own rule and the controllers' own words, in a time of their own.

Jobs come one after the other here: of two that come at the very same moment one may be promised what the other, whose
number is smaller, takes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.jobs.queued import HostAnswer, promised, read_answer, standing_of
from orchestrator.remote.turns import Ticket, ahead, in_the_way

HOSTS = "abc"
GPUS = tuple(f"{host}{index}" for host in HOSTS for index in (0, 1))
POLL_S, LATENCY_S, MARGIN_S = 5.0, 0.5, 20.0
"""MARGIN_S: what `LaunchPlan.longest_s` adds to a time limit."""
MOST_S = 1e6


class Wish(NamedTuple):
    """limit: in parts of what it takes; None: it has none. waits: it takes its place in the queue, else it tries again
    and again.
    """

    after_s: float
    takes_s: float
    gpus: frozenset[str]
    limit: float | None
    waits: bool


wishes = st.lists(
    st.builds(
        Wish,
        st.sampled_from([1.0, 5.0, 20.0]),
        st.sampled_from([5.0, 20.0, 40.0, 90.0]),
        st.frozensets(st.sampled_from(GPUS), min_size=1, max_size=6),
        st.sampled_from([1.0, 1.0, 1.0, 3.0, None]),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=6,
    max_size=12,
)


class Rack:
    """What the hosts know: tickets, with the moment of each promise, and who has which GPU until when at most."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tickets: dict[str, list[Ticket]] = {host: [] for host in HOSTS}
        self.starts: dict[tuple[str, str], float] = {}
        self.held: dict[str, tuple[str, float | None]] = {}

    def shown(self, host: str) -> list[Ticket]:
        found = []
        for ticket in self.tickets[host]:
            at = self.starts.get((host, ticket.job))
            found.append(ticket._replace(starts_s=None if at is None else max(0.0, at - self.now)))
        return found

    def answer(self, host: str, job: str, gpus: list[str], longest_s: float | None) -> HostAnswer:
        """As of `remote/waiting.py`."""
        there = [ticket for ticket in self.shown(host) if not set(gpus).isdisjoint(ticket.gpus)]
        holders = {self.held[gpu] for gpu in gpus if gpu in self.held}
        held = [{"job": name, "user": "", "left_s": until and max(0.0, until - self.now)} for name, until in holders]
        rows = {"tickets": there, "ahead": ahead(job, gpus, there)}
        said = {name: [ticket._asdict() for ticket in found] for name, found in rows.items()}
        return read_answer(host, {**said, "held": held, "goes_past": not in_the_way(job, gpus, longest_s, there)})

    def claim(self, host: str, job: str, gpus: list[str], longest_s: float | None) -> bool:
        """As of `remote/keeper.py`."""
        if in_the_way(job, gpus, longest_s, self.shown(host)) or any(gpu in self.held for gpu in gpus):
            return False
        self.held |= dict.fromkeys(gpus, (job, None if longest_s is None else self.now + longest_s))
        return True

    def release(self, job: str) -> None:
        self.held = {gpu: holder for gpu, holder in self.held.items() if holder[0] != job}


class Controller:
    """One run: a generator of the seconds until its next step. promise: the moment by which it was to have started."""

    def __init__(self, rack: Rack, job: str, wish: Wish, draw: random.Random) -> None:
        self._rack, self.job, self._wish, self._draw = rack, job, wish, draw
        self._on = {host: sorted(gpu for gpu in wish.gpus if gpu[0] == host) for host in {gpu[0] for gpu in wish.gpus}}
        self._longest_s = None if wish.limit is None else wish.limit * wish.takes_s + MARGIN_S
        self.promise: float | None = None
        self.started = math.inf
        self.went_past = False

    def course(self) -> Iterator[float]:
        if self._wish.waits:
            yield from self._takes_its_turn()
        else:
            while not (yield from self._starts()):
                yield POLL_S
        self.started = self._rack.now
        for host in self._on:
            self._rack.tickets[host] = [ticket for ticket in self._rack.tickets[host] if ticket.job != self.job]
            yield self._latency()
        yield self._wish.takes_s
        self._rack.release(self.job)

    def _takes_its_turn(self) -> Iterator[float]:
        number = 1 + max([ticket.number for host in self._on for ticket in self._rack.tickets[host]], default=0)
        for host, gpus in self._on.items():
            self._rack.tickets[host].append(Ticket(self.job, number, gpus, longest_s=self._longest_s))
        while True:
            asked, answers = self._rack.now, {}
            for host, gpus in self._on.items():
                yield self._latency()
                if self.promise is not None:
                    self._rack.starts[host, self.job] = self._rack.now + self.promise - asked
                answers[host] = self._rack.answer(host, self.job, gpus, self._longest_s)
            standing = standing_of(answers)
            if standing.is_turn:
                if (yield from self._starts()):
                    self.went_past = bool(standing.before)
                    return
            else:
                self.promise = promised(self.promise, asked, standing.starts_s, self._longest_s)
            yield POLL_S

    def _starts(self) -> Iterator[float]:
        """On all its hosts or on none."""
        for host, gpus in self._on.items():
            yield self._latency()
            if not self._rack.claim(host, self.job, gpus, self._longest_s):
                self._rack.release(self.job)
                return False
        return True

    def _latency(self) -> float:
        return self._draw.uniform(0, LATENCY_S)


def played(wanted: list[Wish], draw: random.Random) -> list[Controller]:
    rack, turns = Rack(), itertools.count()
    jobs = [Controller(rack, f"job-{number:02d}", wish, draw) for number, wish in enumerate(wanted)]
    comes = itertools.accumulate(wish.after_s for wish in wanted)
    todo = [(at, next(turns), job.course()) for at, job in zip(comes, jobs, strict=True)]
    heapq.heapify(todo)
    while todo and rack.now < MOST_S:
        rack.now, _, course = heapq.heappop(todo)
        wait_s = next(course, None)
        if wait_s is not None:
            heapq.heappush(todo, (rack.now + wait_s, next(turns), course))
    return jobs


ONE = frozenset(GPUS[:1])
PUT_FORWARD = [Wish(1.0, 40.0, ONE, 3.0, True), Wish(1.0, 5.0, frozenset({"a0", "b0"}), 1.0, True)]
PUT_FORWARD += [Wish(5.0, 90.0, ONE, 1.0, True), *[Wish(1.0, 5.0, ONE, 1.0, True)] * 3]
"""The long one would go past the second, whose hosts do not know yet that it was promised an earlier moment since."""


@settings(deadline=None, max_examples=60)
@example(PUT_FORWARD, 0)
@given(wishes, st.integers(0, 1 << 32))
def test_nobody_starts_later_than_it_was_promised_and_everybody_starts(wanted, seed):
    jobs = played(wanted, random.Random(seed))
    for job in jobs:
        assert job.started < MOST_S
        if job.promise is not None:
            # A look that just missed the moment, the pause after it, the look that sees it, and the start.
            assert job.started <= job.promise + POLL_S + 3 * len(HOSTS) * LATENCY_S


def test_a_short_job_goes_past_a_large_one_and_one_without_a_limit_does_not():
    every, one = frozenset(GPUS), frozenset(GPUS[:1])
    first = Wish(0.0, 400.0, frozenset(GPUS[1:]), 1.0, True)
    large, short = Wish(10.0, 100.0, every, 1.0, True), Wish(10.0, 100.0, one, 1.0, True)
    draw = random.Random(1)
    assert [job.went_past for job in played([first, large, short], draw)] == [False, False, True]
    assert not any(job.went_past for job in played([first, large, short._replace(limit=None)], draw))
    assert not any(job.went_past for job in played([first._replace(limit=None), large, short], draw))
    assert not any(job.went_past for job in played([first, large, short._replace(takes_s=600.0)], draw))
