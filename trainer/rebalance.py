"""Shares that follow the ranks' speeds in the course of a run (`shares=auto`).

    balance = Balance(shares=(128, 128), speeds=(None, None))
    change = balance.observe([[400.0, 398.0, 401.0], [150.0, 151.0, 149.0]])       Change(shares=(70, 186), ...)

`Balance` decides and knows neither clock nor network; `Rebalancer` brings it the ranks' compute times and puts its
shares into effect. Only compute time is compared, which ends before a rank waits for others. All ranks decide by
themselves, the same from the same numbers. The samples of each update stay what they are: the stream is only cut anew.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.microbatches import MicroBatches
from trainer.records import MetricsWriter
from trainer.shares import Speed, fastest_shares, without_singles
from trainer.stream import RankBatches

FRESH = 3
"""Updates with the shares of now that each rank has to have taken before they are judged."""
KEPT = 48
SUDDEN = 0.15
"""A rank whose latest FRESH times lie this far from those before has become another: what was before is forgotten."""
NOISE = 0.05
"""Of a rank's times, relative, as long as there are too few of them to tell."""
UNEVEN = 0.03
"""Compute times closer than this are left alone."""
COST = 0.003
"""The part of a step that comparing may take."""
MOST_APART = 200
SENT = 8
"""A rank's latest times that travel at once."""
HEAD = 3
"""What goes before them: samples that it has room for, or 0; ms to prepare a batch, and to compare."""


@dataclass(frozen=True)
class Change:
    """spread: of the ranks' compute times with the shares before, (max - min) / mean."""

    shares: tuple[int, ...]
    before: tuple[int, ...]
    spread: float


class Balance:
    """speeds: as they were measured alone; None where that is not known. LBB's rule (do nothing, or solve again, by the
    spread of compute times) with the noise taken from the times themselves, so that there is no threshold to set.

    A rank's time is its model's (`Speed`; without one, a time a sample) times a factor, the median over its latest
    times. Where the model lacks the fixed part, the factor depends on the share a little: a move then falls short
    rather than too far, and the next one makes up for it.
    """

    def __init__(self, shares: Sequence[int], speeds: Sequence[Speed | None]) -> None:
        self.shares = tuple(shares)
        self.models = [speed or Speed(0.0, 1.0) for speed in speeds]
        self.factors: list[float | None] = [1.0 if speed else None for speed in speeds]
        self.noises = [NOISE] * len(self.shares)
        self.latest: list[list[float]] = [[] for _ in self.shares]

    def observe(self, times_ms: Sequence[Sequence[float]], least_gain: float = 0.0) -> Change | None:
        """times_ms: of each rank, its latest compute times with the shares of now; of one without samples they do not
        count. Gives the shares from now on where others pay: the longest compute time has to fall by `least_gain`.
        """
        for rank, share in enumerate(self.shares):
            if share:
                self._learn(rank, times_ms[rank])
        active = [rank for rank, share in enumerate(self.shares) if share]
        if min(len(self.latest[rank]) for rank in active) < FRESH:
            return None
        now_ms = [self._expected_ms(rank, self.shares[rank]) for rank in active]
        spread = (max(now_ms) - min(now_ms)) / (sum(now_ms) / len(now_ms))
        least = max(UNEVEN, self._noise(active))
        if spread <= least and len(active) == len(self.shares):
            return None
        shares = self._solve()
        then_ms = max(self._expected_ms(rank, share) for rank, share in enumerate(shares) if share)
        gain = 1 - then_ms / max(now_ms)
        # An even run may only gain by a rank that was left out; an uneven one may be as even as whole samples allow.
        if gain <= max(least_gain, UNEVEN / 4 if spread > least else least):
            return None
        change = Change(shares, self.shares, spread)
        self.shares, self.latest = shares, [[] for _ in shares]
        return change

    def _learn(self, rank: int, times_ms: Sequence[float]) -> None:
        expected_ms = self.models[rank].step_ms(self.shares[rank])
        known = self.latest[rank] + [time_ms / expected_ms for time_ms in times_ms]
        before, recent = known[:-FRESH], known[-FRESH:]
        if len(before) >= FRESH:
            moved = abs(_median(recent) / _median(before) - 1)
            if moved > max(SUDDEN, 4 * self.noises[rank]):
                known = recent
        known = known[-KEPT:]
        self.latest[rank] = known
        if known:
            self.factors[rank] = middle = _median(known)
            if len(known) >= SENT:  # the median distance from the median, as the deviation of a normal distribution
                self.noises[rank] = 1.4826 * _median([abs(factor / middle - 1) for factor in known])

    def _noise(self, active: Sequence[int]) -> float:
        """So far apart the ranks' medians hardly ever lie by chance, however often one looks: six of their standard
        errors, a little more the more ranks there are.
        """
        error = max(1.25 * self.noises[rank] / math.sqrt(len(self.latest[rank])) for rank in active)
        return error * (6 + 0.5 * math.log2(len(self.shares)))

    def _expected_ms(self, rank: int, samples: int) -> float:
        return (self.factors[rank] or 0.0) * self.models[rank].step_ms(samples)

    def _solve(self) -> tuple[int, ...]:
        """A rank that has never taken samples, and of which nothing is known, stays without."""
        speeds = [
            Speed(model.fixed_ms * factor, model.sample_ms * factor, model.cap) if factor else Speed(0.0, 1.0, 0)
            for model, factor in zip(self.models, self.factors, strict=True)
        ]
        return without_singles(fastest_shares(speeds, sum(self.shares)))


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


# ---------------------------------------------------------------------------------------------------------------------
# In a run


class Rebalancer:
    """Tells the ranks each other's compute times every few updates, beside the update that follows, and has all of
    them take their new shares from one update on.

    room: the most samples that this rank's memory holds, as the run itself shows it; None where that is not known, or
    a profile has told. say: to people. How often they are told follows from what telling and deciding have taken so
    far, on the rank where they take longest; in a group of their own, since a sum of theirs would otherwise have to
    wait for whatever travels.

    New shares throw away what loaders have prepared. So they have to save more time than that costs, over as many
    updates as have passed since the last ones; what it costs is seen when the run, or a split, begins.
    """

    def __init__(
        self,
        balance: Balance,
        order: RankBatches,
        micro_batches: MicroBatches,
        metrics: MetricsWriter,
        warmup_steps: int,
        room: Callable[[], int | None],
        say: Callable[[str], None],
    ) -> None:
        self.balance, self.order, self.micro_batches = balance, order, micro_batches
        self.metrics, self.room, self.say = metrics, room, say
        self.asked_caps = tuple(micro_batches.caps)
        self.group = dist.new_group(backend="gloo")
        self.times_ms: list[float] = []
        self.to_skip = max(2, warmup_steps)
        self.apart = FRESH
        self.wait_steps = self.to_skip + FRESH
        self.redraw_ms = 0.0
        self.updates = 0
        self.sent: dist.Work | None = None
        self.found = torch.empty(len(balance.shares), HEAD + SENT, dtype=torch.float64)
        self.gather_ms = self._measure_gather_ms()
        self.sending_ms = 0.0
        self.costs_ms: deque[float] = deque(maxlen=SENT)

    def after_update(self, step: int, compute_ms: float, load_ms: float, whole_batch: bool) -> None:
        """On every rank, after each of the run's updates."""
        if self.updates == 0:
            self.redraw_ms = load_ms
        self.updates += 1
        if self.to_skip:
            self.to_skip -= 1
        elif whole_batch:
            self.times_ms.append(compute_ms)
        self.wait_steps -= 1
        began_s = time.perf_counter()
        if self.sent:
            self._decide(step)
            self.costs_ms.append(self.sending_ms + _ms_since(began_s))
        elif self.wait_steps <= 0:
            self._send()
            self.sending_ms = _ms_since(began_s)

    def settle(self) -> None:
        """Before the ranks part."""
        if self.sent:
            self.sent.wait()
            self.sent = None

    def _send(self) -> None:
        cost_ms = self.gather_ms + min(self.costs_ms, default=0.0)
        newest = self.times_ms[-SENT:]
        missing = [math.nan] * (SENT - len(newest))
        own = torch.tensor([self.room() or 0, self.redraw_ms, cost_ms, *newest, *missing], dtype=torch.float64)
        self.times_ms, self.wait_steps = [], self.apart
        self.sent = self._gather(own)

    def _gather(self, own: torch.Tensor) -> dist.Work:
        return dist.all_gather(list(self.found), own, group=self.group, async_op=True)

    def _measure_gather_ms(self) -> float:
        """What travelling takes; undisturbed, as all costs here."""
        own, took_ms = torch.zeros_like(self.found[0]), []
        for _ in range(10):
            began_s = time.perf_counter()
            self._gather(own).wait()
            took_ms.append(_ms_since(began_s))
        return min(took_ms)

    def _decide(self, step: int) -> None:
        assert self.sent  # noqa: S101 - for the type checker
        self.sent.wait()
        self.sent = None
        rows = self.found.tolist()
        self._make_room([int(row[0]) for row in rows])
        times_ms = [[value for value in row[HEAD:] if not math.isnan(value)] for row in rows]
        longest_ms = max((_median(times) for times in times_ms if times), default=0.0)
        redraw_ms, cost_ms = (max(row[place] for row in rows) for place in (1, 2))
        apart = math.ceil(cost_ms / (COST * longest_ms)) if longest_ms else FRESH
        self.apart = min(max(FRESH, apart), MOST_APART)
        change = self.balance.observe(times_ms, redraw_ms / (self.updates * longest_ms) if longest_ms else 0.0)
        if not change:
            return
        self.updates = 0
        self.times_ms, self.wait_steps = [], self.apart  # what was timed since then had the old shares
        self.order.reshare(change.shares)
        shares, before = list(change.shares), list(change.before)
        self.metrics.write("rebalance", step=step + 1, shares=shares, before=before, spread=round(change.spread, 6))
        self.say(
            f"step {step + 2}: shares {','.join(map(str, shares))} instead of {','.join(map(str, before))}, "
            f"compute times were {change.spread:.0%} apart"
        )

    def _make_room(self, rooms: Sequence[int]) -> None:
        """The newest word counts: it comes from larger micro-batches. Never more at once than a person asked for."""
        for rank, (room, asked) in enumerate(zip(rooms, self.asked_caps, strict=True)):
            if room:
                self.micro_batches.caps[rank] = min(room, asked or room)


def _ms_since(began_s: float) -> float:
    return 1000 * (time.perf_counter() - began_s)
