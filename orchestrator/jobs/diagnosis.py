"""Which rank holds a job up, and why, from its hosts' snapshots. Pure.

    verdict = diagnose(plan, {"a": HostSnapshot(...), "b": HostError(...)})
    verdict.kind, verdict.node, verdict.rank, verdict.place     "missed-collective", "b", 1, "train.py:31 in step"

A rank that writes, moves data or changes its line makes progress. An idle rank stands still after QUIET_S without
output of any rank, a rank that waits for a disk after LONG_S, both later if steps take longer. A rank that uses the CPU
at one line computes, or waits as NCCL does: it counts as waiting after LONG_S if another rank is idle, else after
VERY_LONG_S. Stopped processes and silent hosts need no time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from orchestrator.errors import HostError
from orchestrator.hosts.exec import reasons
from orchestrator.jobs.job_store import Kind, Verdict
from orchestrator.jobs.live_stats import GpuLines, Reading, slowed_by_words
from orchestrator.jobs.metric_lines import parse_event
from orchestrator.jobs.stall import HostSnapshot, ProcessSnapshot, RankSnapshot, StackFrame
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.units import counted, format_duration

QUIET_S, LONG_S, VERY_LONG_S = 20.0, 60.0, 1800.0
STEPS, LONG_STEPS = 3, 10
"""In steps: a stall lasts longer than this many times the longest recent step."""
RETRIES = 2
"""Repetitions of the same bytes after which a connection is dead, not busy."""
LOW_CLOCK, BUSY_PERCENT = 0.6, 50

ALL_FRAMES = "`orch why --stacks` shows all frames"
EVERY_RANK = f"every rank has to make the same calls: what leads this one elsewhere? {ALL_FRAMES}"


@dataclass(frozen=True)
class StalledJob:
    plan: LaunchPlan
    hosts: Mapping[str, HostSnapshot]
    silent: Mapping[str, HostError]

    @cached_property
    def ranks(self) -> list[RankActivity]:
        return activities_of(self.hosts)

    @cached_property
    def live(self) -> list[RankActivity]:
        return [rank for rank in self.ranks if rank.is_live]

    @cached_property
    def quiet_s(self) -> float:
        """Since any rank's last output."""
        return min((rank.snapshot.quiet_s for rank in self.live), default=0.0)

    @cached_property
    def _step_s(self) -> float:
        return max((rank.snapshot.step_s or 0.0 for rank in self.live), default=0.0)

    @property
    def is_quiet(self) -> bool:
        return self.quiet_s >= max(QUIET_S, STEPS * self._step_s) and not any(rank.snapshot.grew for rank in self.live)

    @property
    def is_long_quiet(self) -> bool:
        return self._is_quiet_for(LONG_S)

    @property
    def is_very_long_quiet(self) -> bool:
        return self._is_quiet_for(VERY_LONG_S)

    def _is_quiet_for(self, seconds: float) -> bool:
        return self.is_quiet and self.quiet_s >= max(seconds, LONG_STEPS * self._step_s)

    @cached_property
    def idle(self) -> list[RankActivity]:
        return [rank for rank in self.live if not rank.moves]

    @cached_property
    def spinning(self) -> list[RankActivity]:
        """Ranks that use the CPU at a line at which ranks wait for others: with NCCL they may be waiting."""
        at_one = (rank for rank in self.live if rank.at == "collective" and rank.moves and rank.script_is_same)
        return [rank for rank in at_one if self.is_long_quiet and not rank.snapshot.moves_data]

    @cached_property
    def waiting(self) -> list[RankActivity]:
        """Ranks that wait in a collective."""
        idle = [rank for rank in self.live if rank.at == "collective" and not rank.moves]
        is_sure = any(rank.at != "collective" for rank in self.idle) or self.is_very_long_quiet
        return sorted([*idle, *(self.spinning if is_sure else ())], key=lambda rank: rank.rank)

    @cached_property
    def others(self) -> list[RankActivity]:
        return [rank for rank in self.live if rank not in self.waiting]

    @cached_property
    def working(self) -> list[RankActivity]:
        """Ranks for which others may rightly wait."""
        return [] if self.is_very_long_quiet else [rank for rank in self.others if rank.moves]

    @property
    def silence(self) -> str:
        return f"no rank has written anything for {format_duration(self.quiet_s)}"


def diagnose(plan: LaunchPlan, outcomes: Mapping[str, HostSnapshot | HostError]) -> Verdict:
    hosts = {name: found for name, found in outcomes.items() if isinstance(found, HostSnapshot)}
    silent = {name: found for name, found in outcomes.items() if isinstance(found, HostError)}
    job = StalledJob(plan, hosts, silent)
    found = (verdict for find in FINDERS if (verdict := find(job)))
    return next(found, None) or _no_stall(job)


# ---- what needs no time ---------------------------------------------------------------------------------------------


def _stopped(job: StalledJob) -> Verdict | None:
    for rank in job.live:
        if rank.at == "stopped" and rank.process:
            reason = f"{rank.name} is stopped by a signal (state {rank.process.state})"
            return _of(rank, "stopped", reason, f"`orch ssh {rank.node} -- kill -CONT {rank.process.pid}` continues it")
    for name, host in job.hosts.items():
        if host.frozen:
            reason = f"the {host.frozen[0]} of the job on {name} is stopped by a signal"
            return Verdict("stopped", reason, f"`orch ssh {name}`, then `kill -CONT` with its number", name)
    return None


def _full_pipe(job: StalledJob) -> Verdict | None:
    for rank in job.live:
        if rank.at == "pipe":
            is_stopped = rank.snapshot.wrapper in ("T", "t")
            why = ": the process of orch that reads it is stopped by a signal" if is_stopped else ""
            reason = (
                f"{rank.name} writes to {rank.snapshot.full_pipes[0]}, and no process reads it: the pipe is full{why}"
            )
            again = f"`orch ssh {rank.node} -- kill -CONT {rank.snapshot.wrapper_pid}` continues the reader"
            return _of(rank, "full-pipe", reason, again if is_stopped else "is it a pipe of the script's own? Read it")
    return None


def _silent(job: StalledJob) -> Verdict | None:
    if not job.silent or not job.hosts or len(job.idle) < len(job.live):
        return None
    name, error = next(iter(job.silent.items()))
    live = len(job.live)
    still = "the rank on the other host is" if live == 1 else f"the {live} ranks on the other hosts are"
    reason = f"{name} does not answer ({reasons([error])[0]}), and {still} not making progress"
    return Verdict("half-dead-link", reason, error.remedy, name)


# ---- what stands still ----------------------------------------------------------------------------------------------


def _disk(job: StalledJob) -> Verdict | None:
    """A slow disk makes some progress now and then."""
    for rank in job.live if job.is_long_quiet else ():
        if rank.at == "disk" and rank.process and rank.process.stands:
            where = f" ({rank.process.wchan})" if rank.process.wchan else ""
            reason = f"{rank.name} waits in the kernel{where}, for a disk or the server of one; {job.silence}"
            remedy = f"`orch ssh {rank.node} -- dmesg`, and its mounts: is a server gone? A slow disk ends it by itself"
            return _of(rank, "dead-mount", reason, remedy)
    return None


def _link(job: StalledJob) -> Verdict | None:
    for rank in job.live if job.is_quiet else ():
        for link in () if rank.snapshot.moves_data else rank.snapshot.connections:
            if link.retransmits >= RETRIES:
                hosts = [node.name for node in job.plan.nodes if node.address == link.to]
                peer = hosts[0] if len(hosts) == 1 else f"{link.to} port {link.port}"
                tries = f"{link.unsent:,} bytes were sent again {counted(link.retransmits, 'time')}"
                reason = f"{rank.name} sends to {peer} and gets no answer: {tries}"
                return _of(
                    rank, "half-dead-link", reason, "`orch status`; then the cable, switch or firewall between them"
                )
    return None


def _idle_one(job: StalledJob) -> Verdict | None:
    """An idle rank outside of collectives is the cause, whatever the others do."""
    idle = [rank for rank in job.others if not rank.moves and rank.at != "disk"]
    if not job.is_quiet or not idle or job.working:
        return None
    if found := next((rank for rank in idle if rank.at == "loader"), None):
        return _of(found, "loader", *_loader_words(job, found))
    if found := next((rank for rank in idle if rank.at == "lock"), None):
        besides = f"; another of its threads stands at {', '.join(found.besides[:2])}" if found.besides else ""
        reason = f"{found.name} waits for a lock, or for another of its threads{besides}; {job.silence}"
        return _of(found, "deadlock", reason, f"who holds it? {ALL_FRAMES}, and other threads")
    found = _odd([rank for rank in idle if rank.place] or idle)
    if job.waiting and found.place:
        return _missed(job, found, "is idle")
    if job.waiting:
        where = f"{_ranks(job.waiting)} waits in a collective at {job.waiting[0].place}"
        reason = f"{found.name} shows no line{_program(found)}, and {where}: it may wait there, too"
        return _of(found, "stands-still", f"{reason}; {job.silence}", "ask again; then `orch logs`")
    reason = f"{found.name} does nothing{_program(found)}; {job.silence}"
    return _of(found, "stands-still", reason, f"what does it wait for there? {ALL_FRAMES}")


def _loader_words(job: StalledJob, rank: RankActivity) -> tuple[str, str]:
    worker, script = rank.process, rank.snapshot.script
    remedy = "what does the data set wait for there? `num_workers=0` shows it in the rank itself"
    if worker is script or worker is None:
        return f"{rank.name} waits for a batch of its DataLoader; {job.silence}", remedy
    if worker.state in ("T", "t"):
        reason = f"{rank.name} waits for a batch: its DataLoader's worker, pid {worker.pid}, is stopped by a signal"
        return reason, f"`orch ssh {rank.node} -- kill -CONT {worker.pid}` continues it"
    return (
        f"{rank.name} waits for a batch that its DataLoader's worker, pid {worker.pid}, makes; {job.silence}",
        remedy,
    )


def _absent_one(job: StalledJob) -> Verdict | None:
    """Others wait for a rank that has ended or not begun."""
    if not job.is_quiet or not job.waiting:
        return None
    for rank in job.ranks:
        if rank.at == "ended":
            how = f"on {rank.snapshot.signal}" if rank.snapshot.signal else f"with exit code {rank.snapshot.exit_code}"
            return _missed(job, rank, f"has ended {how}")
        if rank.at == "begins":
            return _missed(job, rank, "has not begun")
    return None


def _busy_one(job: StalledJob) -> Verdict | None:
    """Others wait for a rank that evaluates, compiles, unpacks or saves, as far as can be seen."""
    if not job.is_quiet or not job.waiting or not job.others:
        return None
    odd = _odd(job.others)
    how = "waits for a disk" if odd.at == "disk" else "is at work"
    reason = f"{odd.name} {how}{_program(odd)}, and {_ranks(job.waiting)} waits for it at {job.waiting[0].place}"
    return _of(odd, "still-busy", f"{reason}; {job.silence}", f"if it should be done by now: {ALL_FRAMES}")


def _all_wait(job: StalledJob) -> Verdict | None:
    if not job.is_quiet or not job.waiting or job.others:
        return None
    odd = _odd(job.waiting)
    elsewhere = [rank for rank in job.waiting if rank.place != odd.place]
    if elsewhere:
        reason = f"{odd.name} and {_ranks(elsewhere)}, at {elsewhere[0].place}, do not wait in the same collective"
        return _of(odd, "missed-collective", reason, "all ranks have to make the same calls in the same order")
    reason = f"all ranks wait for each other at {odd.place}; {job.silence}"
    return Verdict("stands-still", reason, "the network between them: `orch status`, and NCCL_DEBUG=INFO", None, None)


def _throttled(job: StalledJob) -> Verdict | None:
    for name, host in job.hosts.items():
        for gpu in _last_readings(host):
            if not gpu.sm_mhz or not gpu.max_sm_mhz or (gpu.utilisation or 0) < BUSY_PERCENT:
                continue
            if gpu.sm_mhz < LOW_CLOCK * gpu.max_sm_mhz:
                why = slowed_by_words(gpu.slowed_by or 0) or "its driver reports no reason"
                clock = f"{gpu.sm_mhz:,.0f} of at most {gpu.max_sm_mhz:,.0f} MHz under load ({why})"
                reason = f"nothing stands still, but GPU {gpu.index} of rank {gpu.rank} on {name} runs at {clock}"
                return Verdict(
                    "clock-throttle", reason, f"`orch ssh {name} -- nvidia-smi -q`: heat, power", name, gpu.rank
                )
    return None


FINDERS: Sequence[Callable[[StalledJob], Verdict | None]] = (
    *(_stopped, _full_pipe, _silent, _disk, _link),
    *(_idle_one, _absent_one, _busy_one, _all_wait, _throttled),
)
"""Causes before their consequences."""


def _no_stall(job: StalledJob) -> Verdict:
    if not job.live:
        begun = not job.ranks or any(rank.at == "begins" for rank in job.ranks)
        return Verdict("no-stall", "its ranks have not begun" if begun else "its ranks have ended")
    if len(job.idle) == len(job.live):
        since = format_duration(job.quiet_s)
        return Verdict(
            "no-stall", f"no rank moves at this moment, but the last output came only {since} ago", "ask again"
        )
    held = f"; {_ranks(job.waiting)} waits for others" if job.waiting else ""
    moving = [rank for rank in job.live if rank.moves]
    do = "makes" if len(moving) == 1 else "make"
    reason = f"{len(moving)} of {counted(len(job.live), 'running rank')} {do} progress{held}"
    if not job.is_quiet:
        return Verdict("no-stall", reason)
    odd = _odd(moving)
    if len(job.spinning) == len(job.live):
        elsewhere = next((f", others at {rank.place}" for rank in moving if rank.place != odd.place), "")
        reason = f"all ranks use the CPU{elsewhere}: they compute, or wait as NCCL does; ask again later"
    return _of(odd, "still-busy", f"{reason}; {job.silence}", "")


# ---- words ----------------------------------------------------------------------------------------------------------


def _of(rank: RankActivity, kind: Kind, reason: str, remedy: str) -> Verdict:
    text = rank.frame.text if rank.frame else ""
    return Verdict(kind, reason, remedy, rank.node, rank.rank, rank.place, text)


def _missed(job: StalledJob, rank: RankActivity, how: str, remedy: str = EVERY_RANK) -> Verdict:
    where = job.waiting[0].place
    reason = f"{rank.name} {how}{_program(rank)}, while {_ranks(job.waiting)} waits in a collective at {where}"
    return _of(rank, "missed-collective", f"{reason}; {job.silence}", remedy)


def _program(rank: RankActivity) -> str:
    """For a process without Python frames: its name and its state in the kernel."""
    process = rank.process
    if rank.place or process is None:
        return ""
    return f" ({process.name}, state {process.state}{f', {process.wchan}' if process.wchan else ''})"


def _ranks(some: Sequence[RankActivity]) -> str:
    return some[0].name if len(some) == 1 else f"each of {len(some)} ranks"


def _odd(some: Sequence[RankActivity]) -> RankActivity:
    """The rank with the least common place; of several the last, since rank 0 often does more than others."""
    places = [rank.place for rank in some]
    return min(reversed(some), key=lambda rank: places.count(rank.place))


def _last_readings(host: HostSnapshot) -> Iterator[Reading]:
    lines, last = GpuLines(), dict[tuple[int, int | None], Reading]()
    for line in host.gpu_lines:
        if reading := lines.reading(parse_event(line)):
            last[reading.rank, reading.index] = reading
    yield from last.values()


# Activity of a rank, from two snapshots. Pure. Its place is a frame of the user's code if there is rank, not torch's
# frame below.

At = Literal["ended", "begins", "stopped", "pipe", "disk", "loader", "collective", "lock", "elsewhere"]

LOADER = re.compile(r"/torch/utils/data/")
FETCHES = re.compile(r"/torch/utils/data/_utils/fetch\.py$")
COLLECTIVE = re.compile(r"/torch/(distributed|autograd|cuda|nn/parallel)/|/horovod/")
LOCK = re.compile(r"/(threading|queue|concurrent/futures/\w+|multiprocessing/\w+)\.py$")
LOCK_WORDS = re.compile(r"\bacquire\(|^(async )?with ")
"""In source lines that wait for a lock without a frame of Python's library below."""
COLLECTIVE_WORDS = re.compile(
    r"\b(wait|synchronize|item|backward|barrier|all_\w+|broadcast\w*|reduce\w*|gather|scatter|recv|send)\(",
    re.IGNORECASE,
)
"""In source lines that wait for other ranks, or for a GPU that does."""


@dataclass(frozen=True)
class RankActivity:
    node: str
    rank: int
    at: At
    moves: bool
    """Between the snapshots it moved data, used the CPU, or changed its line."""
    snapshot: RankSnapshot
    frame: StackFrame | None
    """In the user's code if possible."""
    place: str
    """The frame's text; "" if unknown."""
    process: ProcessSnapshot | None
    """The script, or a worker of its DataLoader."""
    besides: tuple[str, ...] = ()
    """Places of its other threads in the user's code."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.node}"

    @property
    def script_is_same(self) -> bool:
        return self.snapshot.script is not None and self.snapshot.script.same and not self.snapshot.grew

    @property
    def is_live(self) -> bool:
        return self.at not in ("ended", "begins")


def activities_of(outcomes: Mapping[str, HostSnapshot | HostError]) -> list[RankActivity]:
    """By rank. outcomes: by host."""
    seen = {name: found for name, found in outcomes.items() if isinstance(found, HostSnapshot)}
    found = [activity_of(name, rank, host.src) for name, host in seen.items() for rank in host.ranks]
    return sorted(found, key=lambda rank: rank.rank)


def activity_of(node: str, snapshot: RankSnapshot, src: str) -> RankActivity:
    script = snapshot.script
    at = _at(snapshot, src)
    process = script
    if at in ("loader", "disk"):
        process = next(_stuck_workers(snapshot, at), script)
    frame = process.own_frame(src) if process else None
    gets_on = script is not None and (
        snapshot.grew or snapshot.does == "busy" or not script.same or snapshot.moves_data
    )
    moves = gets_on and at != "stopped"
    return RankActivity(
        node=node,
        rank=snapshot.rank,
        at=at,
        moves=moves,
        snapshot=snapshot,
        frame=frame,
        place=frame.place(src) if frame else "",
        process=process,
        besides=tuple(_besides(process, src)),
    )


def _besides(process: ProcessSnapshot | None, src: str) -> Iterator[str]:
    for thread in (process.threads or ())[1:] if process else ():
        frame = thread.own_frame(src)
        if frame and frame.is_own(src):
            yield frame.place(src)


def _at(snapshot: RankSnapshot, src: str) -> At:
    script = snapshot.script
    if snapshot.ended or script is None:
        return "ended" if snapshot.ended else "begins"
    if snapshot.does == "stopped":
        return "stopped"
    if snapshot.full_pipes and snapshot.does == "waits" and script.same and not snapshot.grew:
        return "pipe"
    if snapshot.does == "disk" or any(_stuck_workers(snapshot, "disk")):
        return "disk"
    return _by_frames(script, src)


def _by_frames(script: ProcessSnapshot, src: str) -> At:
    """Frames below the user's code show for what a line waits; frames above, whether it makes a batch."""
    own = script.own_frame(src)
    below = [frame.file for frame in script.frames[: script.frames.index(own)]] if own else []
    if _any(COLLECTIVE, below):
        return "collective"
    if _any(LOADER, (frame.file for frame in script.frames)):
        return "loader"
    if _any(LOCK, below):
        return "lock"
    text = own.text if own else ""
    if COLLECTIVE_WORDS.search(text):
        return "collective"
    return "lock" if script.wchan.startswith("futex") and LOCK_WORDS.search(text) else "elsewhere"


def _stuck_workers(snapshot: RankSnapshot, at: At) -> Iterator[ProcessSnapshot]:
    """Its processes that wait for a disk, or make a batch and stand still."""
    for process in snapshot.processes[1:]:
        holds_up = process.state == "D" if at == "disk" else _makes_batch(process)
        if holds_up and process.stands:
            yield process


def _makes_batch(process: ProcessSnapshot) -> bool:
    """A stopped worker shows no frames, only torch's name for it."""
    files = [frame.file for frame in process.frames]
    return _any(FETCHES, files) or (process.state in ("T", "t", "D") and process.name == "pt_data_worker")


def _any(pattern: re.Pattern[str], files: Iterable[str]) -> bool:
    return any(pattern.search(file) for file in files)
