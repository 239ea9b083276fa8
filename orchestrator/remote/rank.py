"""Wrapper around one rank: runs its script under torchrun, writes its logs and reports how it ended.

    torchrun ... --no-python python -m orch_remote.rank <job folder>

torchrun itself only exits with 1. The wrapper writes the script's output to two log files (`output_writer`), and its
exit code or signal to `rank-<r>/exit.json` and the supervisor's control FIFO. It ends the script when torchrun dies
(PR_SET_PDEATHSIG), when the supervisor dies (end of file on the `alive` FIFO), or when asked to.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import answer
from .cgroups import let_go_first
from .forked import Forked, fork_script, watched
from .layout import JobFolder, size_of, write_json
from .meeting import Meeting
from .messages import STOOD_STILL
from .output_writer import OutputWriter
from .print_times import PrintTimes
from .processes import (
    adopt_orphans,
    catches,
    descendants,
    die_with_parent,
    end_all,
    pulse,
    reap_orphans,
    signal_name,
)
from .script_start import ANY, WATCH

PARENT_DIED = signal.SIGUSR1
FORWARDED = (signal.SIGINT, signal.SIGTERM)
LOOK_S = 2.0
RARER = 20
"""Time to the next check whether a rank has joined others, as a fraction (1/RARER) of its run time: a host may have
very many connections.
"""
LATE_S = 2.0
"""A supervisor frozen for this time and the job's `silence_s` has lost its lease (`membership`) and cannot end us: we
end ourselves.
"""
END_S = 5.0
LOST_S = 1.0
METRICS = "metrics.jsonl"
NOT_FINITE = f"{METRICS}.not_finite"
MARK_BYTES = 512
Script = subprocess.Popen[bytes] | Forked
LOCAL_RANK = "--local_rank={LOCAL_RANK}"  # argument for scripts written for torch.distributed.launch; part of the plan


def main() -> None:
    parent = os.getppid()
    job = JobFolder(Path(sys.argv[1]))
    node = json.loads(job.node.read_text())
    # By plan, even if torchrun renumbers ranks after a restart with fewer hosts: logs and metrics keep their places.
    ranks = ranks_of(node, int(os.environ["LOCAL_RANK"]))
    wakeup = _catch_signals()
    die_with_parent(PARENT_DIED)
    adopt_orphans()
    alive = os.open(job.alive, os.O_RDONLY | os.O_NONBLOCK)
    if os.getppid() != parent:
        sys.exit(1)
    agent = job.read_agent()
    meeting = _meeting(job, node, int(agent.get("rendezvous_port", 0)))
    try:
        child, writers = _start(job, node, ranks)
    except (OSError, RuntimeError) as error:  # RuntimeError: no further thread may start
        why = answer.describe(error) if isinstance(error, OSError) else f"{error}: see `ulimit -u` on that host"
        _report(job, ranks, {"event": "ended", **_describe(1, None), "trouble": why})
        sys.exit(f"rank {ranks[0]} did not start: {why}")
    parent = child.parent if isinstance(child, Forked) else os.getpid()
    _report(job, ranks, {"event": "started", "pid": child.pid, "wrapper": os.getpid(), "parent": parent})
    look = _look_out(job, ranks, child.pid, meeting)
    cause = _watch(child, wakeup, alive, int(agent.get("pid", 0)), look, node["silence_s"] + LATE_S)
    end = _describe(child.wait(), cause)
    look()
    if meeting:
        end["met"] = meeting.is_over()
    _end_all_below(child)
    with contextlib.suppress(OSError):
        job.stacks(ranks[0]).unlink()
    if dropped := sum(writer.finish() for writer in writers):
        end["dropped_bytes"] = dropped
    for rank in ranks:
        with contextlib.suppress(OSError):
            write_json(job.rank(rank) / "exit.json", end, sync=False)
    _report(job, ranks, {"event": "ended", **end})
    sys.exit(end["exit_code"] if end["signal"] is None else 128 - child.wait())


def _start(job: JobFolder, node: dict[str, Any], ranks: list[int]) -> tuple[Script, list[OutputWriter]]:
    folder = job.rank(ranks[0])
    folder.mkdir(exist_ok=True)
    ours = {"ORCH_METRICS": str(folder / METRICS), "ORCH_CHECKPOINTS": str(job.checkpoints)}
    environment = {**os.environ, **ours, "ORCH_DATA": os.path.expanduser("~/data")}  # of `orch data push`
    measured = environment.pop(WATCH, "") == "on"
    is_program = bool(node.get("is_program"))
    environment |= watched(
        job, environment, steps=measured, stacks=job.stacks(ranks[0]), watch=ANY if is_program else ""
    )
    if is_program:  # `python` in a shell script is the one that the inventory names
        environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", os.defpath)])
    if node["shares"]:
        environment["ORCH_SHARE"] = str(node["shares"][int(os.environ["LOCAL_RANK"])])
        environment["ORCH_BATCH"] = str(node["settings"]["batch"])
    if node.get("starts_ranks"):
        make_folders(job, ranks[1:])
        environment = without_torchrun(environment, job)
    writers = [
        OutputWriter(folder / f"{name}.log", PrintTimes(folder / f"{name}.times")) for name in ("stdout", "stderr")
    ]
    forked = fork_script(job, ranks[0], environment, [writer.entry for writer in writers])
    child = forked or _start_afresh(job, node, environment, writers)
    let_go_first(child.pid)
    for writer in writers:  # after the fork: forking with threads is unsafe
        writer.start()
    return child, writers


def _start_afresh(
    job: JobFolder, node: dict[str, Any], environment: Mapping[str, str], writers: list[OutputWriter]
) -> subprocess.Popen[bytes]:
    command = [LOCAL_RANK.format(**os.environ) if part == LOCAL_RANK else part for part in node["command"]]
    wrapper = os.getpid()

    def leave_no_orphan() -> None:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != wrapper:
            os._exit(1)

    return subprocess.Popen(
        command if node.get("is_program") else [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=writers[0].entry,
        stderr=writers[1].entry,
        cwd=job.src,
        env=environment,
        start_new_session=True,
        preexec_fn=leave_no_orphan,
    )


def _catch_signals() -> int:
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for signum in (signal.SIGCHLD, PARENT_DIED, *FORWARDED):
        signal.signal(signum, lambda *_: None)
    return read


def _meeting(job: JobFolder, node: dict[str, Any], port: int) -> Meeting | None:
    if int(os.environ["WORLD_SIZE"]) < 2:
        return None
    others = {place[0] for name, place in job.read_peers().items() if name != node["name"]}
    return Meeting(port, others - {node["address"]})


def _look_out(job: JobFolder, ranks: list[int], pid: int, meeting: Meeting | None) -> Callable[[], None]:
    """A call that reports once that the script has joined other ranks, or trains without them, and once that a rank's
    loss is not finite.
    """
    began_s = due_s = time.monotonic()
    finite, trains_alone = set(ranks), False
    metrics = job.rank(ranks[0]) / METRICS
    before = max(0, size_of(metrics))  # of a start that torchrun has repeated

    def look() -> None:
        nonlocal due_s, trains_alone
        now_s = time.monotonic()
        if meeting and not meeting.seen and now_s >= due_s:
            due_s = now_s + (now_s - began_s) / RARER
            steps = size_of(metrics) > before  # a script joins before its first step
            if meeting.look(pid):
                _report(job, ranks, {"event": "met"})
            elif steps and not trains_alone:
                trains_alone = True
                _report(job, ranks, {"event": "alone"})
        for rank in [*finite]:
            if mark := _not_finite(job, rank):
                finite.discard(rank)
                _report(job, [rank], {"event": "not finite", "mark": mark})

    return look


def _not_finite(job: JobFolder, rank: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError), open(job.rank(rank) / NOT_FINITE, "rb") as file:
        mark = json.loads(file.read(MARK_BYTES))
        if isinstance(mark, dict):
            return mark
    return {}


def _watch(
    child: Script, wakeup: int, alive: int, supervisor: int, look: Callable[[], None], still_s: float
) -> str | None:
    """Waits for the child's end; calls `look` every LOOK_S. Returns why we ended it, None if it ended by itself.

    still_s: how long the supervisor may stand still.
    """
    cause = None
    watched: list[int | Forked] = [wakeup, alive, *([child] if isinstance(child, Forked) else [])]
    beats, still = pulse(supervisor), 0
    while child.poll() is None:
        ready, _, _ = select.select(watched, [], [], LOOK_S)
        look()
        if not ready:  # counts looks, not seconds: after a freeze of both, the supervisor has time to wake up
            before, beats = beats, pulse(supervisor)
            still = still + 1 if beats == before != -1 else 0
            if still * LOOK_S >= still_s:
                cause = cause or STOOD_STILL
                _kill(child, signal.SIGKILL)
        if alive in ready:  # the FIFO is never written to: readable means that its writer is gone
            watched.remove(alive)
            cause = cause or "the supervisor died"
            _kill(child, signal.SIGKILL)
        if wakeup in ready:
            reap_orphans(child.pid)
            for signum in os.read(wakeup, 512):
                if signum == PARENT_DIED:
                    cause = cause or "torchrun died"
                    _kill(child, signal.SIGKILL)
                elif signum in FORWARDED:
                    signum = _expected(child.pid, signum)
                    cause = cause or f"asked by {signal.Signals(signum).name}"
                    _kill(child, signum)
    if cause is None and isinstance(child, Forked) and child.was_lost:
        cause = _why_lost(wakeup, alive)
    return cause


def _why_lost(wakeup: int, alive: int) -> str:
    # The same killer may have ended torchrun or the supervisor; their end is about to be reported.
    ready, _, _ = select.select([wakeup, alive], [], [], LOST_S)
    if alive in ready:
        return "the supervisor died"
    return "torchrun died" if wakeup in ready and PARENT_DIED in os.read(wakeup, 512) else "its parent was killed"


def _expected(pid: int, signum: int) -> int:
    # SIGTERM instead of SIGINT for a script that handles it, since scripts for Slurm and torchrun save their work on
    # SIGTERM. A SIGINT handler proves nothing: Python itself has one.
    return signal.SIGTERM if signum == signal.SIGINT and catches(pid, signal.SIGTERM) else signum


def _end_all_below(child: Script) -> None:
    # Ends everything that the script started: without supervisor and keeper no other process could identify it.
    _kill(child, signal.SIGKILL)
    deadline = time.monotonic() + END_S
    parent = child.parent if isinstance(child, Forked) else os.getpid()
    while (left := descendants(parent)) and time.monotonic() < deadline:
        end_all(left, signal.SIGKILL)
        time.sleep(0.01)
    if isinstance(child, Forked):
        child.close()


def _kill(child: Script, signum: int) -> None:
    # The child leads a session, so its process group is everything it started and did not daemonise.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signum)


def _describe(returncode: int, cause: str | None) -> dict[str, Any]:
    name = signal_name(-returncode) if returncode < 0 else None
    return {"exit_code": None if name else returncode, "signal": name, "cause": cause}


def _report(job: JobFolder, ranks: list[int], event: dict[str, Any]) -> None:
    # Without a supervisor there is no reader (ENXIO); exit.json remains.
    with contextlib.suppress(OSError):
        handle = os.open(job.control, os.O_WRONLY | os.O_NONBLOCK)
        try:
            for rank in ranks:
                os.write(handle, json.dumps({"rank": rank, **event}).encode() + b"\n")
        finally:
            os.close(handle)


# One wrapper stands for a command that starts all ranks of its host. The command sees no variables of torchrun. Each
# rank writes metrics into its own folder; output goes to the first rank's logs.

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_")


def ranks_of(node: Mapping[str, Any], local_rank: int) -> list[int]:
    numbers = [int(number) for number in node["rank_numbers"]]
    return numbers if node.get("starts_ranks") else [numbers[local_rank]]


def make_folders(job: JobFolder, others: list[int]) -> None:
    for rank in others:
        job.rank(rank).mkdir(exist_ok=True)
        for log in ("stdout.log", "stderr.log"):
            (job.rank(rank) / log).touch(mode=0o600)


def without_torchrun(environment: Mapping[str, str], job: JobFolder) -> dict[str, str]:
    """Environment of such a command; the trainer replaces `{rank}` by each rank's number."""
    kept = {name: value for name, value in environment.items() if not _is_torchruns(name)}
    return {**kept, "ORCH_METRICS": f"{job.root}/rank-{{rank}}/{METRICS}"}


def _is_torchruns(name: str) -> bool:
    return name in _OF_TORCHRUN or name.startswith(_PREFIXES)


if __name__ == "__main__":
    main()
