"""Events for a user who follows a job, from the frames that its hosts send. Pure, except for the clock and the thread
that diagnoses stalls.

    follow = Follow(plan, remember, until_end=True, ask=ask_why)
    for event in follow.events(watch(...)):     lines that came together, Notice, RunProgress, Bars, Silence, Standstill
        ...
    for event in follow.last_words():           lost output, final progress
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from orchestrator.errors import ConnectError, HostError, HostsError
from orchestrator.jobs.frames import Agent, Beat, FilePiece, Frame
from orchestrator.jobs.job_store import FINAL_STATES, JobRecord
from orchestrator.jobs.lines import Bars, LogLine, Splitter
from orchestrator.jobs.live import LiveView, Notice, RunProgress, Silence, Standstill
from orchestrator.jobs.stall import News, StallProbe, lost_output_words, standstill
from orchestrator.planning.launch_plan import LaunchPlan

LATE_S = 10.0
"""After the job's end, hosts that still send get this long to finish."""
PROGRESS_S = 0.25
BARS_S = 1.0
"""For redrawn lines and `Silence`."""

Event = tuple[LogLine, ...] | Notice | RunProgress | Bars | Silence | Standstill


class Follow:
    """remember: stores the hosts' records and returns the job's. until_end: else only the current content. ask:
    diagnoses a stall and returns the job's record.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        remember: Callable[[Mapping[str, Mapping[str, Any] | HostError]], JobRecord],
        *,
        until_end: bool,
        ask: Callable[[], JobRecord] | None = None,
    ) -> None:
        self.liveness = HostLiveness()
        self.ended_at_s: float | None = None
        """None while the job runs; else the time of its end, or of later data. A lost job may be found again."""
        self._plan, self._remember, self._until_end = plan, remember, until_end
        self._links = _Links(dials_again=until_end)
        self._splitter, self._view, self._news = Splitter(), LiveView(plan), News(plan)
        self._probe = StallProbe(ask) if ask and until_end else None
        self._last_standstill = Standstill()
        self._is_silent, self._has_progress = until_end, False
        self._progress_due_s, self._bars_due_s = 0.0, time.monotonic() + BARS_S

    def events(self, items: Iterable[tuple[str, Frame | HostError]]) -> Iterator[Event]:
        """items: from `watch`."""
        for name, item in items:
            now_s = time.monotonic()
            is_changed = self.liveness.take(name, item, now_s)
            yield from self._links.words(name, item)
            if isinstance(item, FilePiece):
                yield from self._piece(name, item)
            if is_changed:
                yield from self._update(now_s)
            yield from self._when_due()
            if self.ended_at_s is not None and time.monotonic() > self.ended_at_s + LATE_S:
                break
        if lines := tuple(self._splitter.rest()):
            yield lines

    def last_words(self) -> Iterator[Event]:
        """Raises HostsError if hosts refused the connection while the job runs."""
        yield from map(Notice, lost_output_words(self._plan, self.liveness.records))
        has_ended, refused = self.ended_at_s is not None, self._links.refused if self._until_end else []
        for error in refused if has_ended else ():
            yield Notice(f"{error.message}; not all that this host printed is shown here")
        if self._has_progress:
            yield self._progress()
        if refused and not has_ended:
            raise HostsError(refused)

    def _piece(self, name: str, piece: FilePiece) -> Iterator[Event]:
        if piece.restarted:
            yield Notice(f"{name}: {piece.file} was cut, replaced or rotated on its host; it starts again here")
        if lines := tuple(self._splitter.split(name, piece)):
            self._is_silent = False
            yield lines
        self._has_progress |= self._until_end and self._view.take(name, piece)
        if self.ended_at_s is not None:  # a host that still sends is not late
            self.ended_at_s = time.monotonic()

    def _update(self, now_s: float) -> Iterator[Event]:
        record = self._remember(self.liveness.found(now_s))
        if self._probe:
            self._probe.tell(record)
        if self._until_end and not (self._probe and self._probe.is_at_work):
            yield from self._stall_events(record)
        if record.state not in FINAL_STATES:
            self.ended_at_s = None
        elif self.ended_at_s is None:
            if missed := self.liveness.missed(now_s):
                yield Notice(f"{', '.join(sorted(missed))}: no answer; the job's state is as the other hosts report it")
            self.ended_at_s = time.monotonic()

    def _stall_events(self, record: JobRecord) -> Iterator[Event]:
        if (now := standstill(record)) != self._last_standstill:
            self._last_standstill = now
            yield now
        yield from map(Notice, self._news.of(record))

    def _when_due(self) -> Iterator[Event]:
        if self._probe and (record := self._probe.answer()):
            yield from self._stall_events(record)
        if self._has_progress and time.monotonic() > self._progress_due_s:
            self._has_progress, self._progress_due_s = False, time.monotonic() + PROGRESS_S
            self._is_silent = False
            yield self._progress()
        if self._until_end and time.monotonic() > self._bars_due_s:
            self._bars_due_s = time.monotonic() + BARS_S
            if lines := tuple(self._splitter.settle()):
                yield lines
            if bars := self._splitter.bars():
                self._is_silent = False
                yield bars
            if self._is_silent and self.ended_at_s is None:
                yield Silence(self._plan.world_size, since_s(self._plan))

    def _progress(self) -> RunProgress:
        return self._view.progress(since_s(self._plan))


class _Links:
    """dials_again: `watch` reconnects broken connections."""

    def __init__(self, *, dials_again: bool) -> None:
        self._dials_again = dials_again
        self._broken = set[str]()
        self.refused: list[HostError] = []
        """Hosts that are no longer dialled, for example because their key changed."""

    def words(self, name: str, item: Frame | HostError) -> Iterator[Notice]:
        if isinstance(item, ConnectError) and self._dials_again:
            if name not in self._broken:
                yield Notice(f"{item}; the job does not depend on this link, trying again")
            self._broken.add(name)
        elif isinstance(item, HostError):
            self.refused.append(item)
            yield Notice(f"{item}; the job does not depend on this link and keeps running")
        elif name in self._broken and item != Beat():  # sent by the host, not by our own clock
            self._broken.discard(name)
            yield Notice(f"{name}: connected again")


def since_s(plan: LaunchPlan) -> float:
    with suppress(ValueError):
        return max(0.0, time.time() - datetime.fromisoformat(plan.created).timestamp())
    return 0.0


# The hosts' last records while a job is followed. Pure.
#
# A host that loses power sends nothing more, and its last record claims for ever that the supervisor is alive. So a
# record of a living supervisor expires SILENT_S after the last sign of its host; a record of an end stays.

SILENT_S = 30.0
"""Longer than LEASE_S of `remote/membership.py`: by then the other hosts have noticed, unless only our connection
broke.
"""


class HostLiveness:
    """records: each host's last, whatever its age."""

    def __init__(self) -> None:
        self.records: dict[str, Mapping[str, Any]] = {}
        self._refused: dict[str, HostError] = {}
        self._silent_since_s: dict[str, float] = {}
        self._missed = frozenset[str]()

    def take(self, name: str, item: Frame | HostError, now_s: float) -> bool:
        """name: "" for the local clock's beat. Returns whether `found` may have changed."""
        if not name:
            for silent in self.records:
                self._silent_since_s.setdefault(silent, now_s)
        elif isinstance(item, ConnectError) or item == Beat():  # the local clock's beat: nothing came
            self._silent_since_s.setdefault(name, now_s)
        elif isinstance(item, HostError):  # it is no longer dialled
            self._refused[name] = item
        else:
            self._silent_since_s.pop(name, None)
        if isinstance(item, Agent):
            self.records[name] = item.record
        before, self._missed = self._missed, self.missed(now_s)
        return isinstance(item, Agent) or name in self._refused or self._missed != before

    def missed(self, now_s: float) -> frozenset[str]:
        """Hosts whose record of a living supervisor has expired."""
        silent = {name for name, since_s in self._silent_since_s.items() if now_s - since_s > SILENT_S}
        return frozenset(name for name in silent if self.records.get(name, {}).get("alive"))

    def found(self, now_s: float) -> dict[str, Mapping[str, Any] | HostError]:
        words = f"no answer for {SILENT_S:.0f} s"
        alive = {name for name, record in self.records.items() if record.get("alive")}
        refused = {name: error for name, error in self._refused.items() if name in alive or name not in self.records}
        return {**self.records, **refused, **{name: ConnectError(name, words) for name in self.missed(now_s)}}
