"""Exchanges the ranks' compute times during a run, and applies new shares at the same update."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist

from trainer.compute.microbatches import MicroBatches
from trainer.data.sample_stream import Probes, RankBatches
from trainer.ranks.process_group import timeout
from trainer.rebalance.balance import Balance
from trainer.rebalance.estimate import FRESH, SENT
from trainer.shared.metrics import MetricsWriter
from trainer.shared.shares import PROBED

COST = 0.003
"""Largest part of a step for comparing."""


MOST_APART = 200


HEAD = 3
"""Samples that memory holds, or 0; ms to prepare a batch; ms to compare."""


class Rebalancer:
    """room: samples that this rank's memory holds, if known."""

    # The interval follows from the slowest rank's costs. Times travel in a separate group, so that their sum waits for
    # nothing. New shares throw away prepared batches, so they must save more than that, over as many updates as since
    # the last change.

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
        self.group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout()))
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
        self.take(balance.shares)

    def take(self, shares: Sequence[int]) -> None:
        self.balance.take(shares)
        self.order.reshare(shares, self.balance.probes)

    def after_update(self, step: int, compute_ms: float, load_ms: float, samples: int) -> None:
        """Collective. samples: of this rank."""
        if self.updates == 0:
            self.redraw_ms = load_ms
        self.updates += 1
        if self.to_skip:
            self.to_skip -= 1
        elif samples == self.order.share or (samples and not self.order.share):  # a whole share, or a probe
            self.times_ms.append(compute_ms)
        self.wait_steps = 0 if self.order.stream.is_probe(step) else self.wait_steps - 1
        began_s = time.perf_counter()
        if self.sent:
            self._decide(step)
            self.costs_ms.append(self.sending_ms + _ms_since(began_s))
        elif self.wait_steps <= 0:
            self._send()
            self.sending_ms = _ms_since(began_s)

    def settle(self) -> None:
        """Call before the ranks leave."""
        if self.sent:
            self.sent.wait()
            self.sent = None

    def _send(self) -> None:
        # of several, because one may be disturbed
        waited_ms = min(self.costs_ms) if len(self.costs_ms) >= FRESH else 0.0
        cost_ms = self.gather_ms + waited_ms
        newest = self.times_ms[-SENT:]
        missing = [math.nan] * (SENT - len(newest))
        own = torch.tensor([self.room() or 0, self.redraw_ms, cost_ms, *newest, *missing], dtype=torch.float64)
        self.times_ms, self.wait_steps = [], self.apart
        self.sent = self._gather(own)

    def _gather(self, own: torch.Tensor) -> dist.Work:
        return dist.all_gather(list(self.found), own, group=self.group, async_op=True)

    def _measure_gather_ms(self) -> float:
        # CPU time, because the exchange overlaps an update, and on a busy machine the clock would exaggerate.
        own, took_ms = torch.zeros_like(self.found[0]), []
        for _ in range(10):
            began_s = time.process_time()
            self._gather(own).wait()
            took_ms.append(1000 * (time.process_time() - began_s))
        return min(took_ms)

    def _decide(self, step: int) -> None:
        assert self.sent  # noqa: S101 - for the type checker
        self.sent.wait()
        self.sent = None
        rows = self.found.tolist()
        self._make_room([int(row[0]) for row in rows])
        times_ms = [[value for value in row[HEAD:] if not math.isnan(value)] for row in rows]
        of_shares = [times for times, share in zip(times_ms, self.balance.shares, strict=True) if times and share]
        longest_ms = max(map(statistics.median, of_shares), default=0.0)
        redraw_ms, cost_ms = (max(row[place] for row in rows) for place in (1, 2))
        apart = math.ceil(cost_ms / (COST * longest_ms)) if longest_ms else FRESH
        self.apart = min(max(FRESH, apart), MOST_APART)
        change = self.balance.observe(times_ms, redraw_ms / (self.updates * longest_ms) if longest_ms else 0.0)
        if not change:
            return
        self.order.reshare(change.shares, change.probes)
        if change.shares == change.before:
            return
        self.updates = 0
        self.times_ms, self.wait_steps = [], self.apart  # later times were measured with the old shares
        shares, before = list(change.shares), list(change.before)
        self.metrics.write("rebalance", step=step + 1, shares=shares, before=before, spread=round(change.spread, 6))
        self.say(
            f"step {step + 2}: shares {','.join(map(str, shares))} instead of {','.join(map(str, before))}, "
            f"compute times were {change.spread:.0%} apart{_probe_words(change.probes)}"
        )

    def _make_room(self, rooms: Sequence[int]) -> None:
        """Uses the newest values, up to the user's limit."""
        for rank, (room, asked) in enumerate(zip(rooms, self.asked_caps, strict=True)):
            if room:
                self.micro_batches.caps[rank] = min(room, asked or room)


def _probe_words(probes: Probes) -> str:
    if not probes.ranks:
        return ""
    ranks = f"rank{'s' if probes.ranks[1:] else ''} {','.join(map(str, probes.ranks))}"
    return f"; {ranks} tried again with {PROBED} samples every {probes.every} updates"


def _ms_since(began_s: float) -> float:
    return 1000 * (time.perf_counter() - began_s)
