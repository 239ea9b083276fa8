"""Packs jobs of unequal length onto slots of unequal speed, so that the last job ends early. Pure.

    pack(["a", "b", "c"], {"fast": 0.0, "slow": 12.0}, lambda job, slot: 60.0)
    # (Placed("a", "fast", 0.0, 60.0), Placed("b", "slow", 12.0, 72.0), Placed("c", "fast", 60.0, 120.0))

Longest first, each job onto the slot on which it ends first (list scheduling on unequal machines); then jobs of the
slot that ends last are moved, or exchanged with others, while that brings the end forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Takes = Callable[[str, str], float]
"""Seconds of a job on a slot; infinite if it cannot run there."""
MOST_TRIES = 200_000
LEAST = 1e-9
"""A relative gain below this is rounding."""


@dataclass(frozen=True)
class Placed:
    job: str
    slot: str
    start_s: float
    end_s: float


def pack(jobs: Sequence[str], ready_s: Mapping[str, float], takes: Takes) -> tuple[Placed, ...]:
    """In the order of their starts, without jobs that fit nowhere. ready_s: when each slot is free."""
    loads = _longest_first(jobs, ready_s, takes)
    _improve(loads, ready_s, takes)
    placed = [each for slot, load in loads.items() for each in _in_order(slot, load, ready_s[slot], takes)]
    return tuple(sorted(placed, key=lambda each: (each.start_s, each.slot)))


def makespan_s(placed: Sequence[Placed]) -> float:
    return max((each.end_s for each in placed), default=0.0)


def _longest_first(jobs: Sequence[str], ready_s: Mapping[str, float], takes: Takes) -> dict[str, list[str]]:
    loads, ends = {slot: list[str]() for slot in ready_s}, dict(ready_s)
    length = {job: min((takes(job, slot) for slot in ready_s), default=math.inf) for job in jobs}
    for job in sorted(jobs, key=lambda job: -length[job]):
        if length[job] < math.inf:
            best = min(ends, key=lambda slot: ends[slot] + takes(job, slot))
            loads[best].append(job)
            ends[best] += takes(job, best)
    return loads


def _in_order(slot: str, load: Sequence[str], ready_s: float, takes: Takes) -> Iterator[Placed]:
    """Longest first: short ones at the end leave less to wait for if a prediction was wrong."""
    at_s = ready_s
    for job in sorted(load, key=lambda job: -takes(job, slot)):
        yield Placed(job, slot, at_s, at_s := at_s + takes(job, slot))


def _improve(loads: dict[str, list[str]], ready_s: Mapping[str, float], takes: Takes) -> None:
    ends = {slot: ready_s[slot] + sum(takes(job, slot) for job in load) for slot, load in loads.items()}
    tries = 0
    while ends and tries < MOST_TRIES:
        last = max((slot for slot in loads if loads[slot]), key=lambda slot: ends[slot], default=None)
        if last is None:
            return
        best, change = ends[last] * (1 - LEAST), None
        for other in loads:
            for mine, theirs in _exchanges(loads, last, other):
                tries += 1
                end_here = ends[last] - takes(mine, last) + (takes(theirs, last) if theirs else 0.0)
                end_there = ends[other] + takes(mine, other) - (takes(theirs, other) if theirs else 0.0)
                if max(end_here, end_there) < best:
                    best, change = max(end_here, end_there), (other, mine, theirs, end_here, end_there)
        if change is None:
            return
        other, mine, theirs, ends[last], ends[other] = change
        loads[last].remove(mine)
        loads[other].append(mine)
        if theirs:
            loads[other].remove(theirs)
            loads[last].append(theirs)


def _exchanges(loads: Mapping[str, Sequence[str]], last: str, other: str) -> Iterator[tuple[str, str | None]]:
    """Moves of a job to the other slot, and exchanges with one of its jobs."""
    if other != last:
        for mine in loads[last]:
            yield mine, None
            for theirs in loads[other]:
                yield mine, theirs
