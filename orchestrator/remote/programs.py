"""What a supervisor runs on its host, the inventory's `prepare` command and then torchrun, and what their ends mean.

programs = Programs(job, node, state, drain, rendezvous)
await programs.prepare()                    # whether it went well, or there is none
await programs.run_torchrun(argv)           # until it ends
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import answer
from .host_state import HostState
from .layout import JobFolder
from .logs import advice, is_secondary, log_tail, telling_line
from .memory import out_of_memory_kills
from .messages import Failure, Order, failure
from .plain_asyncio import asyncio
from .processes import (
    MARK,
    Identity,
    Killing,
    below_or_marked,
    describe,
    die_with_parent,
    end_all,
    process_group,
    signal_name,
)
from .rendezvous import Rendezvous
from .unseen_line import unseen_line

_NAMES = {"prepare": "the `prepare` command"}


class Programs:
    """drain: hears what the ranks have reported until now. rendezvous: the master's alone."""

    def __init__(
        self,
        job: JobFolder,
        node: dict[str, Any],
        state: HostState,
        drain: Callable[[], None],
        rendezvous: Rendezvous | None,
    ) -> None:
        self.children, self.failures = Children(job, node), FailureDiagnosis(node["name"])
        self._job, self._node, self._state = job, node, state
        self._drain, self._rendezvous = drain, rendezvous

    async def prepare(self) -> bool:
        """Runs the inventory's `prepare` command, once a host and job, before any rank starts."""
        if not self._node.get("prepare"):
            return True
        argv, environment = unseen_line(self._node["prepare"], self.children.environment())
        ended = self._start("prepare", argv, self._job.prepare_log, self._job.src, environment)
        if ended is None:
            return False
        code = await ended
        if code != 0 and not self._state.is_stopping:
            reason = f"{_NAMES['prepare']} {how_it_ended(code)}"
            self._state.fail(self.failures.of_program("prepare", reason, self._job.prepare_log, code))
        self.failures.forget_memory_kills()  # from here on they are the ranks'
        return code == 0

    def torchrun_argv(self, order: Order) -> list[str]:
        """order: a start."""
        values = {
            "rendezvous_port": str(order["rendezvous_port"]),
            "job_dir": str(self._job.root),
            "python": sys.executable,
        }
        return [sys.executable, *(_filled(part, values) for part in self._node["torchrun"])]

    async def run_torchrun(self, argv: list[str]) -> None:
        if not (ended := self._start_torchrun(argv)):
            return
        self.children.watch_gpus()
        code = await ended
        self.children.end_gpu_watch()
        self._drain()
        if self._state.phase != "running":
            return
        if code == 0:
            self._state.enter("done")
        elif not self._state.failures:
            failed = self.failures.of_program(
                "torchrun", f"torchrun {how_it_ended(code)}", self._job.torchrun_log, code
            )
            self._state.fail(failed)

    def _start_torchrun(self, argv: list[str]) -> asyncio.Future[int] | None:
        """The master's gets the socket that its store is to listen on, and we keep none of it."""
        if not (self._rendezvous and self._rendezvous.store):
            return self._start("torchrun", argv, self._job.torchrun_log, self._job.bin)
        with self._rendezvous.store as store:
            environment = {**self.children.environment(), "ORCH_STORE": str(store.fileno())}
            return self._start("torchrun", argv, self._job.torchrun_log, self._job.bin, environment, [store.fileno()])

    def _start(
        self,
        kind: str,
        argv: list[str],
        log: Path,
        folder: Path,
        environment: dict[str, str] | None = None,
        handles: Sequence[int] = (),
    ) -> asyncio.Future[int] | None:
        """A child whose output goes to this log; None where this host cannot start it, which fails the job."""
        try:
            with open(log, "wb") as output:
                return self.children.start(argv, output, folder, environment, handles)
        except OSError as error:
            reason = f"{_NAMES.get(kind, kind)} did not start: {answer.describe(error)}"
            self._state.fail(failure(kind, self._node["name"], reason))
            return None


def _filled(part: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        part = part.replace("{" + name + "}", value)
    return part


# What a supervisor starts on its host, and how it ends all of it: torchrun, `prepare`, the watch over the GPUs.
#
#     children = Children(job, node)
#     ended = children.start([python, "-m", ...], log, folder)     # a future of its exit code
#     leftovers = await children.end_all_of_it(wrappers)            # INT, TERM, KILL, and a second look
#
# Whatever these start in turn is found by descent or by its mark (`processes`), daemonised or not.

KILL_S = 5.0
GPU_WATCH_S = 1.0
"""So long may what a sick driver holds, though it was killed, keep a job from its end."""
LOOK_S = 0.05

# What a host's profile may have left behind and torchrun would obey (it reads PET_* as its own options).
_UNSET = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_UNSET_PREFIXES = ("PET_", "TORCHELASTIC_", "ORCH_")


class Children:
    """All of one job's processes on this host but ourselves."""

    def __init__(self, job: JobFolder, node: dict[str, Any]) -> None:
        self._job, self._node = job, node
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._gpu_watch = self._killed_group = 0
        self._descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)  # the host's own limits: ours grow (`link`)

    def start(
        self,
        argv: list[str],
        log: Any,
        folder: Path,
        environment: dict[str, str] | None = None,
        handles: Sequence[int] = (),
    ) -> asyncio.Future[int]:
        """A child in a session of its own that dies with us: its exit code to come, negative for a signal.

        handles: descriptors that it shall have, by the same numbers.
        """
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment or self.environment(),
            start_new_session=True,
            preexec_fn=self._prepare,
            pass_fds=handles,
        )
        child.returncode = 0  # `reap` hears of its end; Popen must not wait for it, too
        ended = self._exits[child.pid] = asyncio.get_running_loop().create_future()
        return ended

    def _prepare(self) -> None:
        """In the child, before its program."""
        die_with_parent(signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._descriptors)

    def environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in _UNSET and not name.startswith(_UNSET_PREFIXES)
        }
        own = {MARK: str(self._job.root), "ORCH_JOB": self._job.id, "ORCH_NODE": self._node["name"]}
        # The job's own code first: for a script both its folder and the packages shipped with it.
        given = {**inherited, **self._node["env"]}
        path = [str(self._job.src), *filter(None, [given.get("PYTHONPATH")]), str(self._job.bin)]
        return {**given, **own, "PYTHONPATH": os.pathsep.join(path)}

    def watch_gpus(self) -> None:
        if self._node["gpu_uuids"]:
            argv = [sys.executable, "-S", "-m", "orch_remote.gpus", str(self._job.root)]
            # Nothing of the job's own code is to be found before the standard library.
            environment = {**self.environment(), "PYTHONPATH": str(self._job.bin)}
            try:
                self.start(argv, sys.stderr, self._job.bin, environment)
            except OSError as error:  # the job goes on unwatched
                sys.stderr.write(f"GPU use is unknown: {answer.words(error)}\n")
            else:
                self._gpu_watch = next(reversed(self._exits))

    def end_gpu_watch(self) -> None:
        if self._gpu_watch in self._exits:  # not reaped, so the group is still its own
            self._killed_group = self._gpu_watch
            os.killpg(self._killed_group, signal.SIGKILL)

    def reap(self) -> None:
        """Collects every child that ended, adopted ones too. Called on SIGCHLD."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._exits:
                    self._exits.pop(pid).set_result(os.waitstatus_to_exitcode(status))

    async def end_all_of_it(self, wrappers: Callable[[], set[int]]) -> list[str]:
        """The ladder: INT to the ranks (TERM to scripts that handle it: `rank`), TERM to all, KILL to all, each only if
        the one before did not do.

        wrappers: the pids of the rank wrappers. Returns what would not end.
        """
        self.end_gpu_watch()
        grace_s = self._node["grace_s"]
        for signum in (signal.SIGINT, signal.SIGTERM):
            if not self._left():
                break
            # torchrun answers INT by ending its workers itself and at once; the ranks are to have their grace first.
            first = wrappers()
            ranks = [process for process in self._left() if process.pid in first]
            end_all(ranks if signum == signal.SIGINT and ranks else self._left(), signum)
            await until(lambda: not self._left(), grace_s)
        killing = Killing()
        await until(lambda: not self._left(), KILL_S, lambda: killing.of(self._left()))
        await until(lambda: not below_or_marked(self._job.root), GPU_WATCH_S)
        return [describe(process) for process in below_or_marked(self._job.root)]

    def _left(self) -> list[Identity]:
        """What the ladder has to end. The GPU watch was killed before it, and a sick driver may hold that for long."""
        return [one for one in below_or_marked(self._job.root) if process_group(one.pid) != self._killed_group]


async def until(condition: Callable[[], bool], timeout_s: float, meanwhile: Callable[[], None] | None = None) -> bool:
    """Whether the condition came to hold in time; `meanwhile` is called before each further look."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() >= deadline:
            return False
        if meanwhile:
            meanwhile()
        await asyncio.sleep(LOOK_S)
    return True


# What went wrong with a process of ours, from its exit code, its log and the kernel's count of memory kills.
#
# failures = FailureDiagnosis("beta")
# failures.of_program("prepare", "the `prepare` command exited 3", job.prepare_log, 3)
# failures.of_rank({"rank": 1, "exit_code": 7, "signal": None}, log)

OUT_OF_MEMORY = "this host, or the cgroup that it runs in, ran out of memory, and the kernel ended a process"


class FailureDiagnosis:
    """node: this host's name."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._memory_kills = out_of_memory_kills()

    def forget_memory_kills(self) -> None:
        """What the kernel ended until now was none of what is to come."""
        self._memory_kills = out_of_memory_kills()

    def of_program(self, kind: str, reason: str, log: Path, code: int) -> Failure:
        """code: its exit code, negative for a signal. log: where the cause may stand."""
        cause = failure(kind, self._node, reason)
        cause["exit_code"] = code if code > 0 else None
        cause["signal"] = signal_name(-code) if code < 0 else None
        return self._explained(cause, log)

    def of_rank(self, event: dict[str, Any], log: Path) -> Failure:
        """event: as the rank's wrapper reports its end (`rank`). Raises KeyError where that is not of this form."""
        if "trouble" in event:
            cause = failure("rank", self._node, f"rank {event['rank']} did not start: {event['trouble']}")
            cause["rank"], cause["exit_code"] = event["rank"], event["exit_code"]
            return self._explained(cause, None)
        how = f"was killed by {event['signal']}" if event["signal"] else f"exited {event['exit_code']}"
        cause = failure("rank", self._node, f"rank {event['rank']} {how}")
        cause["rank"], cause["exit_code"], cause["signal"] = event["rank"], event["exit_code"], event["signal"]
        return self._explained(cause, log)

    def _explained(self, cause: Failure, log: Path | None) -> Failure:
        if cause["signal"] == "SIGKILL" and out_of_memory_kills() > self._memory_kills:
            cause["reason"] += f": {OUT_OF_MEMORY}"
        # Nobody who is killed from outside says why; one who aborts (NCCL's watchdog does) has said it before.
        if cause["signal"] in (None, "SIGABRT"):
            lines = log_tail(log) if log else []
            cause["log_line"], cause["secondary"] = telling_line(lines), is_secondary(lines)
            if known := advice(lines):
                cause["reason"] += f": {known}"
        return cause


def how_it_ended(code: int) -> str:
    """code: an exit code, negative for a signal."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited {code}"
