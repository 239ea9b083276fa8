"""Whose turn it is on a host's GPUs. Pure.

A job that waits has a ticket on each of its hosts, and all of them bear one number: one more than the greatest that
any ticket for one of its GPUs bore when it came. The smaller number goes first, and of two equal ones the job whose id
does. That is one order for all hosts and all controllers, and no clock has a part in it: no two jobs ever wait for
each other, however their hosts overlap, and nobody who comes later goes before one who waits for the same GPU.

    queue = [Ticket("a-1", 1, ("GPU-1", "GPU-2"), starts_s=900.0), Ticket("b-2", 2, ("GPU-1",))]
    ahead("b-2", ["GPU-1"], queue)                          [Ticket("a-1", ...)]
    in_the_way("b-2", ["GPU-1"], 600.0, queue)              []

A ticket keeps the GPUs that it names, also those that are free: whoever waits for several gets them all at last. Past
it goes who wants none of them, and who is sure to be gone by the moment at which it was promised to start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class Ticket(NamedTuple):
    """gpus: those of this host that it waits for. user: the login that left it. since_s: how long ago. longest_s: so
    long it has its GPUs at most, once it starts. starts_s: in so many seconds it does at the latest; None where nobody
    knows.
    """

    job: str
    number: int
    gpus: Sequence[str]
    user: str = ""
    since_s: float = 0.0
    longest_s: float | None = None
    starts_s: float | None = None


def ahead(job: str, gpus: Collection[str], tickets: Iterable[Ticket]) -> list[Ticket]:
    """Other jobs' tickets for one of these GPUs that go before this job; all of them, where it has no ticket itself."""
    there = sorted(tickets, key=_order)
    own = min((_order(ticket) for ticket in there if ticket.job == job), default=None)
    rivals = [ticket for ticket in there if ticket.job != job and not set(gpus).isdisjoint(ticket.gpus)]
    return [ticket for ticket in rivals if own is None or _order(ticket) < own]


def in_the_way(job: str, gpus: Collection[str], longest_s: float | None, tickets: Iterable[Ticket]) -> list[Ticket]:
    """Those ahead whose start this job might delay if it began now. longest_s: so long its host lets it run."""
    found = ahead(job, gpus, tickets)
    return [each for each in found if longest_s is None or each.starts_s is None or longest_s > each.starts_s]


def _order(ticket: Ticket) -> tuple[int, str]:
    return ticket.number, ticket.job
