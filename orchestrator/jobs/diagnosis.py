"""Who holds a job up, and why, from what its hosts saw of their ranks. Pure.

    verdict = diagnose(plan, {"a": HostLook(...), "b": HostError(...)})
    verdict.kind, verdict.node, verdict.rank, verdict.place     "missed-collective", "b", 1, "train.py:31 in step"

Nothing is a stall while any rank writes, moves data, or comes to another line: what only looks like one for a moment is
a slow step. A rank that is idle stands still after QUIET_S in which no rank has written anything, one that waits for a
disk after LONG_S; where steps take longer, later. Who uses the CPU at one line may compute, or wait as NCCL does: after
LONG_S it is said to wait where another rank is idle, and by itself only after VERY_LONG_S. Until then it is busy, which
is no alarm. A process that is stopped, or a host that is silent, needs no time.
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
from orchestrator.jobs.looks import HostLook, ProcessLook, RankLook, StackFrame
from orchestrator.jobs.metric_lines import parse_event
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.units import counted, format_duration

QUIET_S, LONG_S, VERY_LONG_S = 20.0, 60.0, 1800.0
STEPS, LONG_STEPS = 3, 10
"""A stall lasts longer than so many of the longest of the last steps."""
RETRIES = 2
"""So often in a row the same bytes are sent again where a link is dead, not busy."""
LOW_CLOCK, BUSY_PERCENT = 0.6, 50

ALL_FRAMES = "`orch why --stacks` shows all frames"
EVERY_RANK = f"every rank has to make the same calls: what leads this one elsewhere? {ALL_FRAMES}"


@dataclass(frozen=True)
class StalledJob:
    plan: LaunchPlan
    hosts: Mapping[str, HostLook]
    silent: Mapping[str, HostError]

    @cached_property
    def standings(self) -> list[Standing]:
        return standings_of(self.hosts)

    @cached_property
    def live(self) -> list[Standing]:
        return [one for one in self.standings if one.is_live]

    @cached_property
    def quiet_s(self) -> float:
        """Since any of its ranks wrote something."""
        return min((one.look.quiet_s for one in self.live), default=0.0)

    @cached_property
    def _step_s(self) -> float:
        return max((one.look.step_s or 0.0 for one in self.live), default=0.0)

    @property
    def is_quiet(self) -> bool:
        return self.quiet_s >= max(QUIET_S, STEPS * self._step_s) and not any(one.look.grew for one in self.live)

    @property
    def is_long_quiet(self) -> bool:
        return self._is_quiet_for(LONG_S)

    @property
    def is_very_long_quiet(self) -> bool:
        return self._is_quiet_for(VERY_LONG_S)

    def _is_quiet_for(self, seconds: float) -> bool:
        return self.is_quiet and self.quiet_s >= max(seconds, LONG_STEPS * self._step_s)

    @cached_property
    def idle(self) -> list[Standing]:
        """Those that do nothing at all."""
        return [one for one in self.live if not one.moves]

    @cached_property
    def spinning(self) -> list[Standing]:
        """Those that use the CPU and come to no other line than one at which ranks wait for others: with NCCL they may
        well do that, and need not.
        """
        at_one = (one for one in self.live if one.at == "collective" and one.moves and one.script_is_same)
        return [one for one in at_one if self.is_long_quiet and not one.look.moves_data]

    @cached_property
    def waiting(self) -> list[Standing]:
        """Those that wait in a collective."""
        idle = [one for one in self.live if one.at == "collective" and not one.moves]
        is_sure = any(one.at != "collective" for one in self.idle) or self.is_very_long_quiet
        return sorted([*idle, *(self.spinning if is_sure else ())], key=lambda one: one.rank)

    @cached_property
    def others(self) -> list[Standing]:
        return [one for one in self.live if one not in self.waiting]

    @cached_property
    def working(self) -> list[Standing]:
        """Those that get on, so that others may well be right to wait for them."""
        return [] if self.is_very_long_quiet else [one for one in self.others if one.moves]

    @property
    def for_so_long(self) -> str:
        return f"no rank has written anything for {format_duration(self.quiet_s)}"


def diagnose(plan: LaunchPlan, outcomes: Mapping[str, HostLook | HostError]) -> Verdict:
    hosts = {name: found for name, found in outcomes.items() if isinstance(found, HostLook)}
    silent = {name: found for name, found in outcomes.items() if isinstance(found, HostError)}
    scene = StalledJob(plan, hosts, silent)
    found = (verdict for find in FINDERS if (verdict := find(scene)))
    return next(found, None) or _no_stall(scene)


# ---- what needs no time ---------------------------------------------------------------------------------------------


def _stopped(scene: StalledJob) -> Verdict | None:
    for one in scene.live:
        if one.at == "stopped" and one.process:
            reason = f"{one.name} is stopped by a signal (state {one.process.state})"
            return _of(one, "stopped", reason, f"`orch ssh {one.node} -- kill -CONT {one.process.pid}` lets it go on")
    for name, host in scene.hosts.items():
        if host.frozen:
            reason = f"the {host.frozen[0]} of the job on {name} is stopped by a signal"
            return Verdict("stopped", reason, f"`orch ssh {name}`, then `kill -CONT` with its number", name)
    return None


def _full_pipe(scene: StalledJob) -> Verdict | None:
    for one in scene.live:
        if one.at == "pipe":
            is_stopped = one.look.wrapper in ("T", "t")
            why = ": the process of orch that reads it is stopped by a signal" if is_stopped else ""
            reason = f"{one.name} writes to {one.look.full_pipes[0]}, and nobody takes it: the pipe is full{why}"
            again = f"`orch ssh {one.node} -- kill -CONT {one.look.wrapper_pid}` lets it be read again"
            return _of(one, "full-pipe", reason, again if is_stopped else "is it a pipe of the script's own? Read it")
    return None


def _silent(scene: StalledJob) -> Verdict | None:
    if not scene.silent or not scene.hosts or len(scene.idle) < len(scene.live):
        return None
    name, error = next(iter(scene.silent.items()))
    still = f"none of {counted(len(scene.live), 'rank')} on the other hosts gets on"
    return Verdict("half-dead-link", f"{name} gives no answer ({reasons([error])[0]}), and {still}", error.remedy, name)


# ---- what stands still ----------------------------------------------------------------------------------------------


def _disk(scene: StalledJob) -> Verdict | None:
    """A slow disk that takes a checkpoint, or gives a batch, lets it get on now and then."""
    for one in scene.live if scene.is_long_quiet else ():
        if one.at == "disk" and one.process and one.process.stands:
            where = f" ({one.process.wchan})" if one.process.wchan else ""
            reason = f"{one.name} waits in the kernel{where}, for a disk or the server of one; {scene.for_so_long}"
            remedy = f"`orch ssh {one.node} -- dmesg`, and its mounts: is a server gone? A slow disk ends it by itself"
            return _of(one, "dead-mount", reason, remedy)
    return None


def _link(scene: StalledJob) -> Verdict | None:
    for one in scene.live if scene.is_quiet else ():
        for way in () if one.look.moves_data else one.look.connections:
            if way.retransmits >= RETRIES:
                hosts = [node.name for node in scene.plan.nodes if node.address == way.to]
                peer = hosts[0] if len(hosts) == 1 else f"{way.to} port {way.port}"
                tries = f"{way.unsent:,} bytes were sent again {counted(way.retransmits, 'time')}"
                reason = f"{one.name} sends to {peer} and hears nothing: {tries}"
                return _of(
                    one, "half-dead-link", reason, "`orch status`; then the cable, switch or firewall between them"
                )
    return None


def _idle_one(scene: StalledJob) -> Verdict | None:
    """One that does nothing, and not in a collective: it is the cause, whatever the others do."""
    idle = [one for one in scene.others if not one.moves and one.at != "disk"]
    if not scene.is_quiet or not idle or scene.working:
        return None
    if found := next((one for one in idle if one.at == "loader"), None):
        return _of(found, "loader", *_loader_words(scene, found))
    if found := next((one for one in idle if one.at == "lock"), None):
        besides = f"; another of its threads stands at {', '.join(found.besides[:2])}" if found.besides else ""
        reason = f"{found.name} waits for a lock, or for another of its threads{besides}; {scene.for_so_long}"
        return _of(found, "deadlock", reason, f"who holds it? {ALL_FRAMES}, and other threads")
    found = _odd([one for one in idle if one.place] or idle)
    if scene.waiting and found.place:
        return _missed(scene, found, "is idle")
    if scene.waiting:
        where = f"{_ranks(scene.waiting)} waits in a collective at {scene.waiting[0].place}"
        reason = f"{found.name} shows no line{_program(found)}, and {where}: it may wait there, too"
        return _of(found, "stands-still", f"{reason}; {scene.for_so_long}", "ask again; then `orch logs`")
    reason = f"{found.name} does nothing{_program(found)}; {scene.for_so_long}"
    return _of(found, "stands-still", reason, f"what does it wait for there? {ALL_FRAMES}")


def _loader_words(scene: StalledJob, one: Standing) -> tuple[str, str]:
    worker, script = one.process, one.look.script
    remedy = "what does the data set wait for there? `num_workers=0` shows it in the rank itself"
    if worker is script or worker is None:
        return f"{one.name} waits for a batch of its DataLoader; {scene.for_so_long}", remedy
    if worker.state in ("T", "t"):
        reason = f"{one.name} waits for a batch: its DataLoader's worker, pid {worker.pid}, is stopped by a signal"
        return reason, f"`orch ssh {one.node} -- kill -CONT {worker.pid}` lets it go on"
    return (
        f"{one.name} waits for a batch that its DataLoader's worker, pid {worker.pid}, makes; {scene.for_so_long}",
        remedy,
    )


def _absent_one(scene: StalledJob) -> Verdict | None:
    """Others wait, and one is no longer there, or not yet."""
    if not scene.is_quiet or not scene.waiting:
        return None
    for one in scene.standings:
        if one.at == "ended":
            how = f"on {one.look.signal}" if one.look.signal else f"with exit code {one.look.exit_code}"
            return _missed(scene, one, f"has ended {how}")
        if one.at == "begins":
            return _missed(scene, one, "has not begun")
    return None


def _busy_one(scene: StalledJob) -> Verdict | None:
    """Others wait, and one works: it evaluates, compiles, unpacks or saves, for all that can be seen."""
    if not scene.is_quiet or not scene.waiting or not scene.others:
        return None
    odd = _odd(scene.others)
    how = "waits for a disk" if odd.at == "disk" else "is at work"
    reason = f"{odd.name} {how}{_program(odd)}, and {_ranks(scene.waiting)} waits for it at {scene.waiting[0].place}"
    return _of(odd, "still-busy", f"{reason}; {scene.for_so_long}", f"if it should be done by now: {ALL_FRAMES}")


def _all_wait(scene: StalledJob) -> Verdict | None:
    if not scene.is_quiet or not scene.waiting or scene.others:
        return None
    odd = _odd(scene.waiting)
    elsewhere = [one for one in scene.waiting if one.place != odd.place]
    if elsewhere:
        reason = f"{odd.name} and {_ranks(elsewhere)}, at {elsewhere[0].place}, do not wait in the same collective"
        return _of(odd, "missed-collective", reason, "all ranks have to make the same calls in the same order")
    reason = f"all ranks wait for each other at {odd.place}; {scene.for_so_long}"
    return Verdict("stands-still", reason, "the network between them: `orch status`, and NCCL_DEBUG=INFO", None, None)


def _throttled(scene: StalledJob) -> Verdict | None:
    for name, host in scene.hosts.items():
        for gpu in _last_readings(host):
            if not gpu.sm_mhz or not gpu.max_sm_mhz or (gpu.utilisation or 0) < BUSY_PERCENT:
                continue
            if gpu.sm_mhz < LOW_CLOCK * gpu.max_sm_mhz:
                why = slowed_by_words(gpu.slowed_by or 0) or "its driver does not say why"
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
"""In the order in which a cause goes before what comes of it."""


def _no_stall(scene: StalledJob) -> Verdict:
    if not scene.live:
        begun = not scene.standings or any(one.at == "begins" for one in scene.standings)
        return Verdict("no-stall", "its ranks have not begun" if begun else "its ranks have ended")
    if len(scene.idle) == len(scene.live):
        since = format_duration(scene.quiet_s)
        return Verdict(
            "no-stall", f"no rank moves at this moment, but the last word came only {since} ago", "ask again"
        )
    held = f"; {_ranks(scene.waiting)} waits for others" if scene.waiting else ""
    moving = [one for one in scene.live if one.moves]
    reason = f"{len(moving)} of {len(scene.live)} ranks that run get on{held}"
    if not scene.is_quiet:
        return Verdict("no-stall", reason)
    odd = _odd(moving)
    if len(scene.spinning) == len(scene.live):
        elsewhere = next((f", others at {one.place}" for one in moving if one.place != odd.place), "")
        reason = f"all ranks use the CPU{elsewhere}: they compute, or wait as NCCL does; only time tells"
    return _of(odd, "still-busy", f"{reason}; {scene.for_so_long}", "")


# ---- words ----------------------------------------------------------------------------------------------------------


def _of(one: Standing, kind: Kind, reason: str, remedy: str) -> Verdict:
    text = one.frame.text if one.frame else ""
    return Verdict(kind, reason, remedy, one.node, one.rank, one.place, text)


def _missed(scene: StalledJob, one: Standing, how: str, remedy: str = EVERY_RANK) -> Verdict:
    where = scene.waiting[0].place
    reason = f"{one.name} {how}{_program(one)}, while {_ranks(scene.waiting)} waits in a collective at {where}"
    return _of(one, "missed-collective", f"{reason}; {scene.for_so_long}", remedy)


def _program(one: Standing) -> str:
    """Of what shows no Python line: its name and what the kernel says of it."""
    process = one.process
    if one.place or process is None:
        return ""
    return f" ({process.name}, state {process.state}{f', {process.wchan}' if process.wchan else ''})"


def _ranks(some: Sequence[Standing]) -> str:
    return some[0].name if len(some) == 1 else f"each of {len(some)} ranks"


def _odd(some: Sequence[Standing]) -> Standing:
    """The one whose place the fewest share; the last of these, since rank 0 often does more than others."""
    places = [one.place for one in some]
    return min(reversed(some), key=lambda one: places.count(one.place))


def _last_readings(host: HostLook) -> Iterator[Reading]:
    lines, last = GpuLines(), dict[tuple[int, int | None], Reading]()
    for line in host.gpu_lines:
        if reading := lines.reading(parse_event(line)):
            last[reading.rank, reading.index] = reading
    yield from last.values()


# What one rank is at, from what its host saw of it in two looks. Pure.
#
#     standing = standing_of("alpha", rank_look, src)
#     standing.at, standing.moves, standing.place         "collective", False, "train.py:31 in step"
#
# A frame of the person's own code is named where there is one, not torch's below it.

At = Literal["ended", "begins", "stopped", "pipe", "disk", "loader", "collective", "lock", "elsewhere"]

LOADER = re.compile(r"/torch/utils/data/")
FETCHES = re.compile(r"/torch/utils/data/_utils/fetch\.py$")
COLLECTIVE = re.compile(r"/torch/(distributed|autograd|cuda|nn/parallel)/|/horovod/")
LOCK = re.compile(r"/(threading|queue|concurrent/futures/\w+|multiprocessing/\w+)\.py$")
LOCK_WORDS = re.compile(r"\bacquire\(|^(async )?with ")
"""What a line holds that waits for a lock without a frame of Python's library below it."""
COLLECTIVE_WORDS = re.compile(
    r"\b(wait|synchronize|item|backward|barrier|all_\w+|broadcast\w*|reduce\w*|gather|scatter|recv|send)\(",
    re.IGNORECASE,
)
"""The same of a line that waits for other ranks, or for a GPU that does."""


@dataclass(frozen=True)
class Standing:
    node: str
    rank: int
    at: At
    moves: bool
    """Whether it got on between the two looks: moved data, used the CPU, or stood at another line."""
    look: RankLook
    frame: StackFrame | None
    """Where it stands, of the person's own code if possible."""
    place: str
    """The same in words; "" where nothing is known."""
    process: ProcessLook | None
    """The one that stands there: the script, or a worker of its DataLoader."""
    besides: tuple[str, ...] = ()
    """Where its other threads stand, those of the person's own code."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.node}"

    @property
    def script_is_same(self) -> bool:
        return self.look.script is not None and self.look.script.same and not self.look.grew

    @property
    def is_live(self) -> bool:
        return self.at not in ("ended", "begins")


def standings_of(outcomes: Mapping[str, HostLook | HostError]) -> list[Standing]:
    """Of all ranks that were seen, in their order. outcomes: by host."""
    seen = {name: found for name, found in outcomes.items() if isinstance(found, HostLook)}
    found = [standing_of(name, rank, host.src) for name, host in seen.items() for rank in host.ranks]
    return sorted(found, key=lambda one: one.rank)


def standing_of(node: str, look: RankLook, src: str) -> Standing:
    script = look.script
    at = _at(look, src)
    process = script
    if at in ("loader", "disk"):
        process = next(_stuck_workers(look, at), script)
    frame = process.own_frame(src) if process else None
    gets_on = script is not None and (look.grew or look.does == "busy" or not script.same or look.moves_data)
    moves = gets_on and at != "stopped"
    return Standing(
        node=node,
        rank=look.rank,
        at=at,
        moves=moves,
        look=look,
        frame=frame,
        place=frame.place(src) if frame else "",
        process=process,
        besides=tuple(_besides(process, src)),
    )


def _besides(process: ProcessLook | None, src: str) -> Iterator[str]:
    for thread in (process.threads or ())[1:] if process else ():
        frame = thread.own_frame(src)
        if frame and frame.is_own(src):
            yield frame.place(src)


def _at(look: RankLook, src: str) -> At:
    script = look.script
    if look.ended or script is None:
        return "ended" if look.ended else "begins"
    if look.does == "stopped":
        return "stopped"
    if look.full_pipes and look.does == "waits" and script.same and not look.grew:
        return "pipe"
    if look.does == "disk" or any(_stuck_workers(look, "disk")):
        return "disk"
    return _by_frames(script, src)


def _by_frames(script: ProcessLook, src: str) -> At:
    """The frames below the person's own say what the line waits for; those above it, whether it makes a batch."""
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


def _stuck_workers(look: RankLook, at: At) -> Iterator[ProcessLook]:
    """Those of its processes that hold it up: that wait for a disk, or make a batch and stand still."""
    for one in look.processes[1:]:
        holds_up = one.state == "D" if at == "disk" else _makes_batch(one)
        if holds_up and one.stands:
            yield one


def _makes_batch(one: ProcessLook) -> bool:
    """A worker that is stopped shows no frames, and is known by the name that torch gives it."""
    files = [frame.file for frame in one.frames]
    return _any(FETCHES, files) or (one.state in ("T", "t", "D") and one.name == "pt_data_worker")


def _any(pattern: re.Pattern[str], files: Iterable[str]) -> bool:
    return any(pattern.search(file) for file in files)
