"""Receives frames from all hosts of a job, and turns them into events for a user who follows it. `Follow` is pure,
except for the clock and the thread that diagnoses stalls.

    follow = Follow(plan, remember, until_end=True, ask=ask_why)
    for event in follow.events(watch(...)):     lines that came together, Notice, RunProgress, Bars, Silence, Standstill
        ...
    for event in follow.last_words():           lost output, final progress

With `folds`, tracebacks wait for the job's end (`tracebacks`), and the end is an event: Ending.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from orchestrator.errors import ConnectError, HostError, HostsError
from orchestrator.jobs.frames import NODE_FILES, RANK_FILES, Agent, Beat, End, FilePiece, Frame, Held, read_frames
from orchestrator.jobs.job_store import FINAL_STATES, JobRecord
from orchestrator.jobs.lines import Bars, LogLine, Splitter
from orchestrator.jobs.live import LiveView, Notice, RunProgress, Silence, Standstill
from orchestrator.jobs.stall import News, StallProbe, lost_output_words, standstill
from orchestrator.jobs.tracebacks import Ending, Tracebacks
from orchestrator.planning.job_spec import SILENCE_S
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.units import some

LATE_S = 10.0
"""After the job's end, hosts that still send get this long to finish; others get GONE_S since their last sign."""
GONE_S = 3.0
SETTLE_S = 0.5
"""For the last lines of all hosts, before the Ending; for all hosts' places in the queue."""
PROGRESS_S = 0.25
BARS_S = 1.0
"""For redrawn lines and `Silence`."""
STILL_S = 10.0
"""Without a step for longer, progress states it, and the clock goes on."""

_AGE = re.compile(r" for [0-9.hms]+")

Event = tuple[LogLine, ...] | Notice | RunProgress | Bars | Silence | Standstill | Ending


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
        folds: bool = False,
    ) -> None:
        self.liveness = HostLiveness((node.name for node in plan.nodes), plan.asked.silence_s)
        self._tracebacks = Tracebacks(plan.job) if folds else None
        self._record: JobRecord | None = None
        """The ended job's, until an Ending was yielded."""
        self.ended_at_s: float | None = None
        """None while the job runs; else the time of its end, or of later data. A lost job may be found again."""
        self._plan, self._remember, self._until_end = plan, remember, until_end
        self._links = _Links(dials_again=until_end)
        self._splitter, self._view, self._news = Splitter(), LiveView(plan), News(plan)
        self._probe = StallProbe(ask) if ask and until_end else None
        self._last_standstill = Standstill()
        self._is_silent, self._has_progress = until_end, False
        self._is_cut_off = False
        self._waits, self._started = Waits(), plan.created
        self._was_alive = False
        """Else the job had ended before, and all its lines are still to come."""
        self._progress_due_s, self._bars_due_s = 0.0, time.monotonic() + BARS_S
        self._stepped_s: float | None = None

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
            if self.ended_at_s is not None and self._is_enough(self.ended_at_s, time.monotonic()):
                break
        if lines := self._held_back(self._splitter.rest()):
            yield lines
        if self._tracebacks:
            yield from self._ending()
            if lines := self._tracebacks.rest():
                yield lines

    def _is_enough(self, ended_at_s: float, now_s: float) -> bool:
        return now_s > ended_at_s + LATE_S or self.liveness.only_gone_are_left(now_s)

    def _held_back(self, lines: Iterable[LogLine]) -> tuple[LogLine, ...]:
        return self._tracebacks.take(lines, time.monotonic()) if self._tracebacks else tuple(lines)

    def _ending(self) -> Iterator[Event]:
        if self._record and self._tracebacks:
            if lines := self._held_back(self._splitter.rest()):
                yield lines
            if self._has_progress:
                self._has_progress = False
                yield self._progress()
            yield self._tracebacks.end(self._record)
            self._record = None

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
        if piece.restarted and not (self._plan.detached and self._plan.attempt):  # else a new attempt has begun
            yield Notice(f"{name}: {piece.file} was cut, replaced or rotated on its host; it starts again here")
        if lines := self._held_back(self._splitter.split(name, piece)):
            self._is_silent = False
            yield lines
        if self._until_end and self._view.take(name, piece):
            self._has_progress, self._stepped_s = True, time.monotonic()
        if self.ended_at_s is not None:  # a host that still sends is not late
            self.ended_at_s = time.monotonic()

    def _update(self, now_s: float) -> Iterator[Event]:
        record = self._remember(self.liveness.found(now_s))
        self._was_alive |= any(known.get("alive") for known in self.liveness.records.values())
        if self._probe:
            self._probe.tell(record)
        self._waits.take(record, now_s)
        self._started = record.started or self._started
        if self._until_end and not (self._probe and self._probe.is_at_work):
            yield from self._stall_events(record)
        if record.state not in FINAL_STATES:
            self.ended_at_s = self._record = None
        elif self.ended_at_s is None:
            if missed := self.liveness.missed(now_s):
                yield Notice(f"{', '.join(sorted(missed))}: no answer; the job's state is as the other hosts report it")
            self.ended_at_s, self._record = time.monotonic(), record

    def _stall_events(self, record: JobRecord) -> Iterator[Event]:
        if (now := standstill(record)) != self._last_standstill:
            self._last_standstill = now
            yield now
        yield from map(Notice, self._news.of(record))

    def _when_due(self) -> Iterator[Event]:
        now_s = time.monotonic()
        if self._until_end and (words := self._waits.news(now_s)):
            yield Notice(f"{self._plan.job} {words}")
        if self._until_end and self.ended_at_s is None:
            yield from self._cut_off(now_s)
        if self._tracebacks and (lines := self._tracebacks.due(now_s, is_failing=self.liveness.is_failing)):
            yield lines
        is_over = self.ended_at_s is not None and self._was_alive
        if is_over and (self.liveness.all_have_ended or now_s > (self.ended_at_s or 0) + SETTLE_S):
            yield from self._ending()
        if self._probe and (record := self._probe.answer()):
            yield from self._stall_events(record)
        self._has_progress |= self._still_s() > 0 and now_s > self._progress_due_s + BARS_S
        if self._has_progress and time.monotonic() > self._progress_due_s:
            self._has_progress, self._progress_due_s = False, time.monotonic() + PROGRESS_S
            self._is_silent = False
            yield self._progress()
        if self._until_end and time.monotonic() > self._bars_due_s:
            self._bars_due_s = time.monotonic() + BARS_S
            if lines := self._held_back(self._splitter.settle()):
                yield lines
            if bars := self._splitter.bars():
                self._is_silent = False
                yield bars
            if self._is_silent and self.ended_at_s is None and not self._waits.is_queued:
                yield Silence(self._plan.world_size, since_s(self._started))

    def _cut_off(self, now_s: float) -> Iterator[Notice]:
        """No end of an attempt: its hosts may be at work, with only this machine's network down."""
        silent_s = self.liveness.all_silent_s(now_s)
        was_cut_off, self._is_cut_off = self._is_cut_off, silent_s > 0
        if self._is_cut_off and not was_cut_off:
            since = datetime.fromtimestamp(time.time() - silent_s).strftime("%H:%M:%S")
            names, job = some([node.name for node in self._plan.nodes], 6), self._plan.job
            retries = "; --retries acts once a host reports an end" if self._plan.attempt else ""
            yield Notice(
                f"no host of {job} answers since {since} ({names}): they or this machine's network are down, so it may "
                f"still run. Ctrl-C leaves it; `orch cancel --job {job}` ends it once they answer{retries}"
            )

    def _progress(self) -> RunProgress:
        return replace(self._view.progress(since_s(self._started)), still_s=self._still_s())

    def _still_s(self) -> float:
        if self._stepped_s is None or self.ended_at_s is not None:
            return 0.0
        still_s = time.monotonic() - self._stepped_s
        return still_s if still_s > STILL_S else 0.0


class Waits:
    """A queued job's place; reported when it has not changed for SETTLE_S, since hosts report one after another."""

    def __init__(self) -> None:
        self.is_queued = False
        self._words = self._reported = ""
        self._since_s = 0.0

    def take(self, record: JobRecord, now_s: float) -> None:
        self.is_queued = record.state == "queued"
        words = record.waits_for or (self._words if self.is_queued else "")
        if _AGE.sub("", words) != _AGE.sub("", self._words):
            self._since_s = now_s
        self._words = self._reported if record.state in FINAL_STATES else words

    def news(self, now_s: float) -> str:
        now = _AGE.sub("", self._words)
        if now == self._reported or now_s < self._since_s + SETTLE_S:
            return ""
        self._reported = now
        return f"waits: {self._words}" if now else "starts"


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


def since_s(started: str | None) -> float:
    with suppress(ValueError):
        return max(0.0, time.time() - datetime.fromisoformat(started or "").timestamp())
    return 0.0


# The hosts' last records while a job is followed. Pure.
#
# A host that loses power sends nothing more, and its last record claims for ever that the supervisor is alive. So a
# record of a living supervisor expires `--silence` and BEYOND_S after the last sign of its host; that of an end stays.

BEYOND_S = 10.0
"""Later than `--silence`: by then the other hosts have noticed, unless only our connection broke."""


class HostLiveness:
    """records: each host's last, whatever its age."""

    def __init__(self, expected: Iterable[str] = (), silence_s: float = SILENCE_S) -> None:
        self._silent_s = silence_s + BEYOND_S
        self.records: dict[str, Mapping[str, Any]] = {}
        self._open = {*expected}
        """Hosts that have not sent all."""
        self._refused: dict[str, HostError] = {}
        self._silent_since_s: dict[str, float] = {}
        self._missed = frozenset[str]()

    def take(self, name: str, item: Frame | HostError, now_s: float) -> bool:
        """name: "" for the local clock's beat. Returns whether `found` may have changed."""
        if not name:
            for silent in {*self.records, *self._open}:
                self._silent_since_s.setdefault(silent, now_s)
        elif isinstance(item, ConnectError) or item == Beat():  # the local clock's beat: nothing came
            self._silent_since_s.setdefault(name, now_s)
        elif isinstance(item, HostError):  # it is no longer dialled
            self._refused[name] = item
        else:
            self._silent_since_s.pop(name, None)
        if isinstance(item, Agent):
            self.records[name] = item.record
        if name and not isinstance(item, End):
            self._open.add(name)
        elif name:
            self._open.discard(name)
        before, self._missed = self._missed, self.missed(now_s)
        return isinstance(item, Agent) or name in self._refused or self._missed != before

    def all_silent_s(self, now_s: float) -> float:
        """How long nothing has come from any host; 0 up to the time after which records expire."""
        since_s = [self._silent_since_s.get(name, now_s) for name in {*self.records, *self._open}]
        silent_s = now_s - max(since_s, default=now_s)
        return silent_s if silent_s > self._silent_s else 0.0

    @property
    def is_failing(self) -> bool:
        ends = ("stopping", "ended")
        return any(record.get("failures") or record.get("phase") in ends for record in self.records.values())

    @property
    def all_have_ended(self) -> bool:
        return all(record.get("state") in [*FINAL_STATES] for record in self.records.values())

    def only_gone_are_left(self, now_s: float) -> bool:
        """Every host has sent all, or has been silent for GONE_S."""
        return all(now_s - self._silent_since_s.get(name, now_s) > GONE_S for name in self._open)

    def missed(self, now_s: float) -> frozenset[str]:
        """Hosts whose record of a living supervisor has expired."""
        silent = {name for name, since_s in self._silent_since_s.items() if now_s - since_s > self._silent_s}
        return frozenset(name for name in silent if self.records.get(name, {}).get("alive"))

    def found(self, now_s: float) -> dict[str, Mapping[str, Any] | HostError]:
        words = f"no answer for {self._silent_s:.0f} s"
        alive = {name for name, record in self.records.items() if record.get("alive")}
        refused = {name: error for name, error in self._refused.items() if name in alive or name not in self.records}
        return {**self.records, **refused, **{name: ConnectError(name, words) for name in self.missed(now_s)}}


# Frames from all hosts of a job: one stream per host, reconnected as often as necessary.

RETRY_S = 1.0
ALL_FILES = (*RANK_FILES, *NODE_FILES)
WAITING_FRAMES = 64
"""At most 256 KiB each. When full, the connections wait, never the job."""


def watch(
    plan: LaunchPlan,
    hosts: Mapping[str, ConnectedHost],
    *,
    offsets: Mapping[str, Mapping[str, Held]],
    follow: bool,
    limit_bytes: int | None = None,
    files: Sequence[str] = ALL_FILES,
    times: bool = False,
    reconnect: Callable[[str], ConnectedHost] | None = None,
) -> Generator[tuple[str, Frame | HostError], None, None]:
    """Yields (node, frame), or (node, error) for a broken connection.

    offsets: per node and file, the part that is here. files: kinds, like `metrics.jsonl`. times: pieces of logs carry
    the time of printing. reconnect: dials a broken connection until it works; no byte is lost or repeated.
    Yields ("", Beat) after a second without frames.
    """
    wanted = {"follow": follow, "files": list(files), "limit_bytes": limit_bytes, "times": times}
    return _Watch(plan, hosts, wanted, reconnect).items(offsets)


def watch_records(plan: LaunchPlan, hosts: Mapping[str, ConnectedHost]) -> Iterator[tuple[str, Frame | HostError]]:
    """Only the supervisors' records; broken connections are not dialled again."""
    wanted = {"follow": True, "files": [], "limit_bytes": None, "times": False}
    return _Watch(plan, hosts, wanted, None).items({})


class _Watch:
    """A thread per host, one queue. wanted: of the request to `remote/reader.py`."""

    def __init__(
        self,
        plan: LaunchPlan,
        hosts: Mapping[str, ConnectedHost],
        wanted: Mapping[str, Any],
        reconnect: Callable[[str], ConnectedHost] | None,
    ) -> None:
        self._plan, self._hosts, self._wanted, self._reconnect = plan, hosts, wanted, reconnect
        self._frames: queue.Queue[tuple[str, Frame | HostError | BaseException | None]] = queue.Queue(WAITING_FRAMES)
        self._leaving = threading.Event()

    def items(self, offsets: Mapping[str, Mapping[str, Held]]) -> Generator[tuple[str, Frame | HostError], None, None]:
        names = [node.name for node in self._plan.nodes if node.name in self._hosts]
        for name in names:
            words = (name, dict(offsets.get(name, {})))
            threading.Thread(target=self._listen, args=words, daemon=True, name=f"watch-{name}").start()
        open_hosts = len(names)
        try:
            while open_hosts:
                try:
                    name, item = self._frames.get(timeout=1.0)
                except queue.Empty:
                    yield "", Beat()  # lets the reader check its own deadlines
                    continue
                if item is None:
                    open_hosts -= 1
                elif isinstance(item, HostError) or not isinstance(item, BaseException):
                    yield name, item
                else:
                    raise item
        finally:
            self._leaving.set()

    def _listen(self, name: str, held: dict[str, Held]) -> None:
        try:
            self._to_its_end(self._hosts[name], held)
        except BaseException as error:  # a bug of ours: the main thread has to raise it
            self._put(name, error)
        self._put(name, None)

    def _put(self, name: str, item: Frame | HostError | BaseException | None) -> None:
        while not self._leaving.is_set():
            try:
                self._frames.put((name, item), timeout=1.0)
                return
            except queue.Full:
                continue

    def _to_its_end(self, host: ConnectedHost, held: dict[str, Held]) -> None:
        """Updates `held`. Without `follow` a broken connection is dialled again while it brings new bytes: after
        minutes hosts hang up on a slow reader, like a pager (`remote/answer.py`).
        """
        name, follow = host.node, self._wanted["follow"]
        while not self._leaving.is_set():
            before = _size(held)
            try:
                return self._read(host, held)
            except HostError as error:
                may_pass = self._reconnect is not None and isinstance(error, ConnectError)
                is_worth_another = may_pass and (follow or _size(held) > before)
                if follow or not is_worth_another:
                    self._put(name, error)
                if not is_worth_another:
                    return None
            try:
                host = self._dial(host)
            except HostError as error:
                return self._put(name, error)
        return None

    def _read(self, host: ConnectedHost, held: dict[str, Held]) -> None:
        """Raises HostError if the connection breaks before the last frame."""
        node = self._plan.node(host.node)
        marker, limit = ask.new_marker(), self._wanted["limit_bytes"]
        offsets = {file: have.request() for file, have in held.items()}
        ranks = list(node.rank_numbers)
        request = {"workdir": node.workdir, "job": self._plan.job, "ranks": ranks, **self._wanted, "offsets": offsets}
        with ask.open_stream(host, "reader", request, marker) as chunks:
            frames = read_frames(host.node, chunks, frozenset(ranks), held, marker=marker.encode(), limit_bytes=limit)
            for frame in frames:
                if self._leaving.is_set():
                    return
                self._put(host.node, frame)
                if isinstance(frame, End):
                    return
        raise ConnectError(host.node, "its answer ended too early")

    def _dial(self, host: ConnectedHost) -> ConnectedHost:
        """Raises HostError if a retry cannot help: a changed host key, a refused login."""
        assert self._reconnect  # noqa: S101 - for the type checker
        if not self._wanted["follow"]:
            return self._reconnect(host.node)
        while not self._leaving.wait(RETRY_S):
            try:
                return self._reconnect(host.node)
            except ConnectError:
                continue
        return host


def _size(held: Mapping[str, Held]) -> int:
    return sum(have.offset for have in held.values())
