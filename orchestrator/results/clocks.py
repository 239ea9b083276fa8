"""Hosts' clocks against each other, from what one of them must have done before another. Pure.

    clocks = align({(0, 1): 3.0, (1, 0): -1.0}, ranks=[0, 1])
    clocks.offsets_ms[1], clocks.within_ms          # 2.0, 1.0: rank 1's times plus 2 are rank 0's, to within 1 ms

Each bound says: the offset of b less that of a is at most so much. A message that a sends at s and b has at r (each by
its own clock) cannot have come before it was sent: offset(a) - offset(b) <= r - s. Messages both ways leave an interval
between two hosts; its middle supposes that the fastest message took equally long either way, as NTP does (RFC 5905,
section 8). Over several hosts the tightest interval is a shortest path (Floyd and Warshall), and the middles of the
intervals to one rank break no bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLACKS_MS = (0.0, 0.1, 1.0, 10.0)
"""By how much bounds may contradict each other: a GPU's clock and its host's are compared through a call."""


@dataclass(frozen=True)
class Clocks:
    """offsets_ms: what to add to each rank's times. within_ms: how far any of them may be off."""

    offsets_ms: dict[int, float]
    within_ms: float


def align(bounds: Mapping[tuple[int, int], float], ranks: Sequence[int]) -> Clocks | None:
    """bounds: (a, b) -> the most that the offset of b can exceed that of a, ms. The first rank's offset is 0.

    None where some rank is not tied to the first one both ways, or bounds contradict each other.
    """
    for slack_ms in SLACKS_MS:
        most = _tightest(bounds, ranks, slack_ms)
        if all(most[rank, rank] >= 0 for rank in ranks):
            return _middles(most, ranks)
    return None


def _tightest(
    bounds: Mapping[tuple[int, int], float], ranks: Sequence[int], slack_ms: float
) -> dict[tuple[int, int], float]:
    most = {(a, b): bounds.get((a, b), math.inf) + slack_ms for a in ranks for b in ranks}
    most |= {(rank, rank): 0.0 for rank in ranks}
    for over in ranks:
        for a in ranks:
            for b in ranks:
                most[a, b] = min(most[a, b], most[a, over] + most[over, b])
    return most


def _middles(most: Mapping[tuple[int, int], float], ranks: Sequence[int]) -> Clocks | None:
    first = ranks[0]
    if not all(math.isfinite(most[first, rank] + most[rank, first]) for rank in ranks):
        return None
    offsets = {rank: (most[first, rank] - most[rank, first]) / 2 for rank in ranks}
    return Clocks(offsets, max((most[first, rank] + most[rank, first]) / 2 for rank in ranks))
