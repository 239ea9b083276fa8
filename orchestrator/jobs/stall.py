"""Detects stalled jobs, has them diagnosed, and words warnings (also: ranks never met, NaN, lost output).

stall_of(plan, records, known)  # Stall(quiet_s=180, ranks=(...)); None while a rank prints
is_due(stall)                   # whether to diagnose it (`jobs/diagnosis.py`)
"""

from __future__ import annotations

import math
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from orchestrator.jobs.job_store import FINAL_STATES, Answer, JobRecord, Stall, StillRank, Verdict
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.record import Record, Words
from orchestrator.units import format_duration

if TYPE_CHECKING:
    from orchestrator.jobs.live import Standstill


DOES = {
    "waits": "waiting, with no CPU use",
    "disk": "waiting in the kernel, for a disk perhaps",
    "stopped": "stopped by a signal",
    "busy": "using the CPU",
    "ended": "ended",
}
NAMED = 4
MOST_S, MOST_TIME_S = 1e9, 1e11
AGAIN = 2
"""A stall that looked healthy is diagnosed again after 2, 4, 8 minutes, and so on."""


def stall_of(plan: LaunchPlan, records: Mapping[str, Any], known: Stall | None = None) -> Stall | None:
    """None unless every host reports its ranks as quiet, and some rank runs. known: the last stall; the same stall
    keeps its diagnosis.
    """
    found, quiet_s, since = list[StillRank](), math.inf, list[float]()
    for node in plan.nodes:
        record = records.get(node.name)
        record = record if isinstance(record, Mapping) else {}
        does = [_does(record, rank) for rank in node.rank_numbers]
        if None in does:
            return None
        found += [StillRank(node=node.name, rank=n, does=d) for n, d in zip(node.rank_numbers, does, strict=True) if d]
        since.append(_seconds(record.get("quiet_since"), MOST_TIME_S))
        if set(does) != {"ended"}:
            quiet_s = min(quiet_s, _seconds(record.get("quiet_s"), MOST_S))
    if all(rank.does == "ended" for rank in found):
        return None
    stall = Stall(quiet_s=quiet_s, ranks=tuple(found), since=tuple(since))
    return stall.model_copy(update={"answer": known.answer}) if known and _is_same(stall, known) else stall


def _is_same(now: Stall, before: Stall) -> bool:
    """A host whose ranks have ended no longer reports `since`."""
    return len(now.since) == len(before.since) and all(
        new in (0.0, old) for new, old in zip(now.since, before.since, strict=True)
    )


def is_due(stall: Stall | None) -> bool:
    """Once per stall, and again while it looks healthy."""
    if stall is None or stall.answer is None:
        return stall is not None
    return not stall.answer.verdict.is_alarm and stall.quiet_s >= AGAIN * stall.answer.quiet_s


def needs_diagnosis(record: JobRecord) -> bool:
    return record.state == "running" and is_due(record.stall)


def answered(record: JobRecord, verdict: Verdict) -> JobRecord:
    """Unchanged if the stall is over."""
    if record.stall is None or record.state in FINAL_STATES:
        return record
    answer = Answer(verdict=verdict, quiet_s=record.stall.quiet_s)
    return record.model_copy(update={"stall": record.stall.model_copy(update={"answer": answer})})


def _seconds(value: Any, most: float) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= most else 0.0


def _does(record: Mapping[str, Any], rank: int) -> Any:
    """None if the rank prints, or is not reported."""
    ranks = record.get("ranks")
    reported = ranks.get(str(rank)) if isinstance(ranks, Mapping) else None
    if not isinstance(reported, Mapping):
        return None
    if reported.get("does") in ("waits", "disk", "stopped", "busy"):
        return reported["does"]
    return "ended" if "exit_code" in reported or "signal" in reported else None


def joined(plan: LaunchPlan, records: Mapping[str, Any]) -> bool | None:
    """Whether any two ranks met; None if unknown, for a single rank, or after a rank failed."""
    met = list[Any]()
    for node in plan.nodes:
        record = records.get(node.name)
        ranks = record.get("ranks") if isinstance(record, Mapping) else None
        for rank in node.rank_numbers:
            reported = ranks.get(str(rank)) if isinstance(ranks, Mapping) else None
            has_failed = isinstance(reported, Mapping) and (reported.get("exit_code") or reported.get("signal"))
            met.append(reported.get("met") if isinstance(reported, Mapping) and not has_failed else None)
    if True in met:
        return True
    return False if plan.world_size > 1 and all(value is False for value in met) else None


def stall_words(stall: Stall) -> str:
    """`no output for 3m00s: waiting, with no CPU use: alpha (rank 0); using the CPU: beta (rank 1)`."""
    return f"no output for {format_duration(stall.quiet_s)}: {'; '.join(_groups(stall))}"


def verdict_words(verdict: Verdict) -> str:
    """`missed collective: rank 1 on v100 is idle, ...; it is at train.py:47 in step: time.sleep(1000)`."""
    line = f": {verdict.line}" if verdict.line else ""
    where = f"; it is at {verdict.place}{line}" if verdict.place else ""
    return f"{verdict.kind.replace('-', ' ')}: {verdict.reason}{where}"


def alarm_words(record: JobRecord) -> str:
    """ "" if it makes progress."""
    stall = record.stall if record.state == "running" else None
    if stall and stall.answer:
        verdict = stall.answer.verdict
        remedy = f"; try: {verdict.remedy}" if verdict.remedy else ""
        return f"{verdict_words(verdict)}{remedy}" if verdict.is_alarm else ""
    return f"{stall_words(stall)}; `orch why {record.id}` names who holds it up" if stall and stall.waits else ""


def standstill(record: JobRecord) -> Standstill:
    """For a live view, with silence that is no alarm."""
    from orchestrator.jobs.live import Standstill

    stall = record.stall if record.state == "running" else None
    if stall and stall.answer:
        return Standstill(verdict_words(stall.answer.verdict), stall.answer.verdict.is_alarm)
    return Standstill(stall_words(stall), True) if stall and stall.waits else Standstill()


def _groups(stall: Stall) -> Iterator[str]:
    for does, words in DOES.items():
        hosts: dict[str, list[str]] = {}
        for rank in stall.ranks:
            if rank.does == does:
                hosts.setdefault(rank.node, []).append(str(rank.rank))
        if hosts:
            named = [f"{node} (rank{'s' * (len(of) > 1)} {', '.join(of)})" for node, of in list(hosts.items())[:NAMED]]
            more = f" and {len(hosts) - NAMED} more hosts" if len(hosts) > NAMED else ""
            yield f"{words}: {', '.join(named)}{more}"


class News:
    """Messages not shown yet."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._shown: object = None
        self._is_alone_shown = self._is_not_finite_shown = False

    def of(self, record: JobRecord) -> Iterator[str]:
        words, stall = alarm_words(record), record.stall
        alarm = stall and (stall.answer or stall.ranks) if words else None
        if alarm and alarm != self._shown:
            yield f"{words}; the job keeps running"
        self._shown = alarm
        if not self._is_alone_shown and (words := alone_words(self._plan, record)):
            self._is_alone_shown = True
            yield words
        if not self._is_not_finite_shown and record.not_finite:
            self._is_not_finite_shown = True
            yield (
                f"{record.not_finite.words}; the job keeps running"
                if record.state == "running"
                else record.not_finite.words
            )


def alone_words(plan: LaunchPlan, record: JobRecord) -> str:
    """ "" if ranks met or this is unknown; our own trainer always joins."""
    if record.joined is not False or plan.kind == "experiment" or record.state not in ("running", "succeeded"):
        return ""
    return (
        f"the {plan.world_size} ranks joined no process group, each runs by itself: a script joins with "
        "torch.distributed.init_process_group, a framework by its settings (`orch help frameworks`)"
    )


def last_words(plan: LaunchPlan, record: JobRecord) -> Iterator[str]:
    """For a report."""
    if record.stall:
        answer = record.stall.answer
        if answer.verdict.is_alarm if answer else record.stall.waits:
            words = verdict_words(answer.verdict) if answer else stall_words(record.stall)
            yield f"How its ranks were seen last: {words}."
    if words := alone_words(plan, record):
        yield f"{words[0].upper()}{words[1:]}."


# Diagnoses stalls in a thread, next to a follower: once per stall, without delaying it.
#
#     probe = StallProbe(job.ask_why)
#     probe.tell(record)              # starts a diagnosis if due
#     if record := probe.answer():    # the record with the diagnosis, once
#         ...
#     probe.is_at_work                # a diagnosis is running


class StallProbe:
    """ask: takes seconds, in a daemon thread."""

    def __init__(self, ask: Callable[[], JobRecord]) -> None:
        self._ask = ask
        self._answers = queue.SimpleQueue[JobRecord | BaseException]()
        self.is_at_work = False

    def tell(self, record: JobRecord) -> None:
        if not self.is_at_work and needs_diagnosis(record):
            self.is_at_work = True
            threading.Thread(target=self._work, daemon=True, name=f"why-{record.id}").start()

    def answer(self) -> JobRecord | None:
        """None if there is no new answer. Raises the thread's exception."""
        try:
            found = self._answers.get_nowait()
        except queue.Empty:
            return None
        self.is_at_work = False
        if isinstance(found, BaseException):
            raise found
        return found

    def _work(self) -> None:
        try:
            self._answers.put(self._ask())
        except BaseException as error:  # a bug of ours: the follower raises it
            self._answers.put(error)


# Output of ranks that a full or broken disk lost, as the hosts report it. Pure; records are untrusted.
#
#     [*lost_output_words(plan, records)]     ["a: the disk of its work folder was full or failed, 512 bytes of ..."]


def lost_output_words(plan: LaunchPlan, records: Mapping[str, Any]) -> Iterator[str]:
    """If a host's record is unreadable, from the master's."""
    reported = _mapping(records.get(plan.master), "dropped")
    for node in plan.nodes:
        ranks = _mapping(records.get(node.name), "ranks")
        for rank in map(str, node.rank_numbers):
            sizes = [_mapping(ranks, rank).get("dropped_bytes"), _mapping(reported, node.name).get(rank)]
            size = max((size for size in sizes if isinstance(size, int)), default=0)
            if 0 < size < 1 << 63:
                lost = f"{size} bytes of what rank {rank} printed are lost"
                yield f"{node.name}: the disk of its work folder was full or failed, {lost}; the job went on"


def _mapping(record: Any, key: str) -> Mapping[str, Any]:
    value = record.get(key) if isinstance(record, Mapping) else None
    return value if isinstance(value, Mapping) else {}


# A host's two snapshots of its ranks, taken by `orch why` (`remote/why.py`), as checked values. Pure.

Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
# A process that moves more between the snapshots makes progress; heartbeats and background threads move less.
MOVES_BYTES = 1 << 16
LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3|^<")


class StackFrame(NamedTuple):
    file: Words
    line: Count
    function: Words
    text: Words
    """Only of the job's own code."""

    def is_own(self, src: str) -> bool:
        return self.file.startswith(f"{src}/") or not self.file.startswith(("/", "<"))

    def place(self, src: str) -> str:
        function = "" if self.function == "<module>" else f" in {self.function}"
        return f"{self.file.removeprefix(f'{src}/')}:{self.line}{function}"


class ThreadSnapshot(Record):
    main: bool
    frames: Annotated[tuple[StackFrame, ...], Field(max_length=64)]
    """Innermost first."""

    def own_frame(self, src: str) -> StackFrame | None:
        """The innermost frame of the job's code, else outside of libraries, else of all."""
        own = (frame for frame in self.frames if frame.is_own(src))
        apart = (frame for frame in self.frames if not LIBRARIES.search(frame.file))
        return next(own, None) or next(apart, None) or next(iter(self.frames), None)


class ProcessSnapshot(Record):
    pid: Count
    name: Words
    state: Words
    """A letter of proc(5)."""
    wchan: Words
    """"" if unknown."""
    same: bool
    """Its main thread is at the same line in both snapshots."""
    idle: bool
    """It used almost no CPU in between."""
    moved_bytes: Count = 0
    threads: Annotated[tuple[ThreadSnapshot, ...], Field(max_length=16)] | None = None
    """None if it is not Python, handles our signal itself, or does not answer."""

    @property
    def stands(self) -> bool:
        return self.same and self.idle and not self.moves_data

    @property
    def moves_data(self) -> bool:
        return self.moved_bytes >= MOVES_BYTES

    @property
    def frames(self) -> tuple[StackFrame, ...]:
        return self.threads[0].frames if self.threads else ()

    def own_frame(self, src: str) -> StackFrame | None:
        return self.threads[0].own_frame(src) if self.threads else None


class WaitingConnection(Record):
    to: Words
    port: Count
    unsent: Count
    """Not confirmed by the peer."""
    unread: Count
    """Not read by the rank."""
    retransmits: Count
    """Unanswered repetitions."""


class RankSnapshot(Record):
    rank: Count
    ended: bool
    exit_code: int | None = None
    signal: Words | None = None
    does: Literal["waits", "busy", "disk", "stopped"] = "waits"
    """See `remote/stillness.py`."""
    grew: bool = False
    """Wrote logs or metrics."""
    quiet_s: Seconds = 0.0
    """Since its last output."""
    step: Count | None = None
    step_s: Seconds | None = None
    """The longest of its last steps."""
    wrapper: Words = ""
    """Our process that reads its output."""
    wrapper_pid: Count = 0
    full_pipes: Annotated[tuple[Words, ...], Field(max_length=2)] = ()
    processes: Annotated[tuple[ProcessSnapshot, ...], Field(max_length=64)] = ()
    """The script first; () if the rank has ended or not begun."""
    more: Count = 0
    net_bytes: Count = 0
    connections: Annotated[tuple[WaitingConnection, ...], Field(max_length=64)] = ()

    @property
    def moves_data(self) -> bool:
        return self.net_bytes >= MOVES_BYTES or any(one.moves_data for one in self.processes)

    @property
    def script(self) -> ProcessSnapshot | None:
        return self.processes[0] if self.processes else None


class HostSnapshot(Record):
    state: Words | None = None
    alive: bool = False
    src: Words
    frozen: Annotated[tuple[Words, ...], Field(max_length=2)] = ()
    """Stopped by a signal: supervisor, keeper."""
    gpu_lines: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    ranks: Annotated[tuple[RankSnapshot, ...], Field(max_length=1024)]
