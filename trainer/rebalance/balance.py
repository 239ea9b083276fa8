"""Decides on new shares from the ranks' compute times (`shares=auto`), without clock or network.

    >>> balance = Balance(shares=(128, 128), speeds=(None, None))
    >>> change = balance.observe([[400.0, 398.0, 401.0], [150.0, 151.0, 149.0]])
    >>> change.shares
    (70, 186)

All ranks decide alike from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.data.sample_stream import NO_PROBES, Probes
from trainer.rebalance.estimate import FRESH, Estimate
from trainer.shared.shares import PROBED, Speed, fastest_shares, without_singles

UNEVEN = 0.03
"""Smaller relative differences are ignored."""
PROBE_EVERY = 30
"""Updates between probes."""
PROBE_COST = 0.05
"""Largest part of all time for probing."""


@dataclass(frozen=True)
class Change:
    """Shares stay if only the probes differ."""

    shares: tuple[int, ...]
    before: tuple[int, ...]
    spread: float
    """(max - min) / mean of the compute times before."""
    probes: Probes = NO_PROBES


class Balance:
    # LBB's rule (do nothing, or solve again, by the spread of compute times), with a threshold from the times' own
    # noise. A rank without a share that would be useful at its best known speed is probed with a few samples now and
    # then.

    def __init__(self, shares: Sequence[int], speeds: Sequence[Speed | None]) -> None:
        self.shares = tuple(shares)
        self.ranks = [Estimate(speed) for speed in speeds]
        self.probes = self._wanted_probes()

    def take(self, shares: Sequence[int]) -> None:
        for rank, share in zip(self.ranks, self.shares, strict=True):
            rank.leave(share)
        self.shares = tuple(shares)
        self.probes = self._wanted_probes()

    def observe(self, times_ms: Sequence[Sequence[float]], least_gain: float = 0.0) -> Change | None:
        """times_ms: latest compute times by rank, or of its probes. least_gain: part of the
        longest time to be saved.
        """
        for rank, share, found_ms in zip(self.ranks, self.shares, times_ms, strict=True):
            rank.learn(share, found_ms) if share else rank.probe(found_ms)
        active = [rank for rank, share in enumerate(self.shares) if share]
        if min(len(self.ranks[rank].times_ms) for rank in active) < FRESH:
            return None
        now_ms = [self.ranks[rank].expected_ms(self.shares[rank]) for rank in active]
        spread = (max(now_ms) - min(now_ms)) / (sum(now_ms) / len(now_ms))
        least = max(UNEVEN, self._noise(active))
        if spread <= least and len(active) == len(self.shares):
            return None
        before, shares = self.shares, self._solve([rank.speed for rank in self.ranks])
        then_ms = max(self.ranks[rank].expected_ms(share) for rank, share in enumerate(shares) if share)
        gain = 1 - then_ms / max(now_ms)
        # An even run gains only from a rank that was left out; an uneven run may become as even as whole samples allow.
        if gain > max(least_gain, UNEVEN / 4 if spread > least else least):
            self.take(shares)
            return Change(shares, before, spread, self.probes)
        wanted = self._wanted_probes()
        if not self._differs(wanted):
            return None
        self.probes = wanted
        return Change(before, before, spread, wanted)

    def _noise(self, active: Sequence[int]) -> float:
        """Six standard errors of a median, and more for many ranks."""
        return max(self.ranks[rank].error for rank in active) * (6 + 0.5 * math.log2(len(self.shares)))

    def _solve(self, speeds: Sequence[Speed | None]) -> tuple[int, ...]:
        known = [speed or Speed(0.0, 1.0, 0) for speed in speeds]
        return without_singles(fastest_shares(known, sum(self.shares)))

    def _wanted_probes(self) -> Probes:
        # A rank that is useless at its best is not probed.
        wanted = [rank for rank, share in enumerate(self.shares) if not share and self._is_worth_it_at_best(rank)]
        now_ms = max(rank.expected_ms(share) for rank, share in zip(self.ranks, self.shares, strict=True))
        probe_ms = max((self.ranks[rank].expected_ms(PROBED) for rank in wanted), default=0.0)
        held_up = probe_ms / now_ms - 1 if now_ms else 0.0
        return Probes(tuple(wanted), max(PROBE_EVERY, math.ceil(held_up / PROBE_COST))) if wanted else NO_PROBES

    def _differs(self, wanted: Probes) -> bool:
        if not set(wanted.ranks) <= set(self.probes.ranks):
            return True
        return bool(wanted.ranks) and not 0.5 < wanted.every / self.probes.every < 2

    def _is_worth_it_at_best(self, rank: int) -> bool:
        best = self.ranks[rank].best
        speeds = [best if other is self.ranks[rank] else other.speed for other in self.ranks]
        return best is None or self._solve(speeds)[rank] > 0
