"""Shares that follow the ranks' speeds in the course of a run (`shares=auto`).

    >>> balance = Balance(shares=(128, 128), speeds=(None, None))
    >>> change = balance.observe([[400.0, 398.0, 401.0], [150.0, 151.0, 149.0]])
    >>> change.shares
    (70, 186)

`Balance` decides and knows neither clock nor network; what a rank's times say of its speed, `estimate` knows.
`Rebalancer` brings both the times and puts the shares into effect. Only compute time is compared, which ends before a
rank waits for others. All ranks decide by themselves, the same from the same numbers. The samples of each update stay
what they are: the stream is only divided again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.data.sample_stream import NO_PROBES, Probes
from trainer.rebalance.estimate import FRESH, Estimate
from trainer.shared.shares import PROBED, Speed, fastest_shares, without_singles

UNEVEN = 0.03
"""Compute times closer than this are left alone."""
PROBE_EVERY = 30
"""Updates from one probe of the ranks left out to the next."""
PROBE_COST = 0.05
"""The part of all time that probing may take: where a probe holds the others up for longer, there are fewer."""


@dataclass(frozen=True)
class Change:
    """New shares. They may be the same as before, and only the probes be others."""

    shares: tuple[int, ...]
    before: tuple[int, ...]
    spread: float
    """(max - min) / mean of the ranks' compute times with the shares before."""
    probes: Probes = NO_PROBES


class Balance:
    """speeds: as they were measured alone; None where that is not known. LBB's rule (do nothing, or solve again, by the
    spread of compute times) with the noise taken from the times themselves, so that there is no threshold to set.

    A rank that is left out shows no times. If it would be worth its while at the fastest that it was known to be, it is
    probed: now and then it takes a few samples, and comes back as soon as they say so.
    """

    def __init__(self, shares: Sequence[int], speeds: Sequence[Speed | None]) -> None:
        self.shares = tuple(shares)
        self.ranks = [Estimate(speed) for speed in speeds]
        self.probes = self._wanted_probes()

    def take(self, shares: Sequence[int]) -> None:
        """Those that somebody else has decided on."""
        for rank, share in zip(self.ranks, self.shares, strict=True):
            rank.leave(share)
        self.shares = tuple(shares)
        self.probes = self._wanted_probes()

    def observe(self, times_ms: Sequence[Sequence[float]], least_gain: float = 0.0) -> Change | None:
        """times_ms: of each rank, its latest compute times with the shares of now; of one without a share, those of
        its probes. Gives what is from now on where others pay: the longest compute time has to fall by `least_gain`.
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
        # An even run may only gain by a rank that was left out; an uneven one may be as even as whole samples allow.
        if gain > max(least_gain, UNEVEN / 4 if spread > least else least):
            self.take(shares)
            return Change(shares, before, spread, self.probes)
        wanted = self._wanted_probes()
        if not self._differs(wanted):
            return None
        self.probes = wanted
        return Change(before, before, spread, wanted)

    def _noise(self, active: Sequence[int]) -> float:
        """So far apart the ranks' medians hardly ever lie by chance, however often one looks: six of their standard
        errors, a little more the more ranks there are.
        """
        return max(self.ranks[rank].error for rank in active) * (6 + 0.5 * math.log2(len(self.shares)))

    def _solve(self, speeds: Sequence[Speed | None]) -> tuple[int, ...]:
        """A rank that has never taken samples, and of which nothing is known, stays without."""
        known = [speed or Speed(0.0, 1.0, 0) for speed in speeds]
        return without_singles(fastest_shares(known, sum(self.shares)))

    def _wanted_probes(self) -> Probes:
        """A rank that is left out at its best is not probed: that could only show what is known."""
        wanted = [rank for rank, share in enumerate(self.shares) if not share and self._is_worth_it_at_best(rank)]
        now_ms = max(rank.expected_ms(share) for rank, share in zip(self.ranks, self.shares, strict=True))
        probe_ms = max((self.ranks[rank].expected_ms(PROBED) for rank in wanted), default=0.0)
        held_up = probe_ms / now_ms - 1 if now_ms else 0.0
        return Probes(tuple(wanted), max(PROBE_EVERY, math.ceil(held_up / PROBE_COST))) if wanted else NO_PROBES

    def _differs(self, wanted: Probes) -> bool:
        """By as much as is worth drawing the batches again. A rank that is probed in vain costs nothing of that."""
        if not set(wanted.ranks) <= set(self.probes.ranks):
            return True
        return bool(wanted.ranks) and not 0.5 < wanted.every / self.probes.every < 2

    def _is_worth_it_at_best(self, rank: int) -> bool:
        best = self.ranks[rank].best
        speeds = [best if other is self.ranks[rank] else other.speed for other in self.ranks]
        return best is None or self._solve(speeds)[rank] > 0
