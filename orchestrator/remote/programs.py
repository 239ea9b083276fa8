"""Runs the inventory's `prepare` command and torchrun on a host, ends all their processes, and explains failures.

programs = Programs(job, node, state, drain, rendezvous)
await programs.prepare()                    # True if it succeeded or is not set
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
from .cgroups import out_of_memory_kills
from .host_state import HostState
from .layout import JobFolder
from .link import asyncio
from .logs import advice, is_secondary, log_tail, telling_line
from .messages import Failure, Order, failure
from .ports import Rendezvous
from .preloading import Preloading
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
    unseen_line,
)

_NAMES = {"prepare": "the `prepare` command"}


class Programs:
    """drain: processes pending reports of ranks. rendezvous: only on the master."""

    def __init__(
        self,
        job: JobFolder,
        node: dict[str, Any],
        state: HostState,
        drain: Callable[[], None],
        rendezvous: Rendezvous | None,
        attempt: int = 1,
    ) -> None:
        self.children, self.failures = Children(job, node, attempt), FailureDiagnosis(node["name"])
        self._job, self._node, self._state = job, node, state
        self._drain, self._rendezvous = drain, rendezvous
        self._preloading = Preloading(job, node, self.children)

    def begin(self) -> None:
        """Begins work that needs no `go`."""
        if not self._node.get("prepare"):  # it may install what is imported
            self._preloading.begin()

    async def prepare(self) -> bool:
        """Runs once per host and job, before any rank."""
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
        self.failures.forget_memory_kills()  # later kills are the ranks'
        if code == 0:
            self._preloading.begin()
        return code == 0

    def torchrun_argv(self, order: Order) -> list[str]:
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
        with contextlib.ExitStack() as after:
            store = self._rendezvous.store if self._rendezvous else None
            handles = [after.enter_context(store).fileno()] if store else []
            try:
                with open(self._job.torchrun_log, "wb") as log:
                    if ended := self._preloading.launch(argv[1:], [log.fileno(), *handles]):
                        return ended
            except OSError:
                pass  # a full disk: `_start` reports it
            environment = self.children.environment() | ({"ORCH_STORE": str(handles[0])} if handles else {})
            return self._start("torchrun", argv, self._job.torchrun_log, self._job.bin, environment, handles)

    def _start(
        self,
        kind: str,
        argv: list[str],
        log: Path,
        folder: Path,
        environment: dict[str, str] | None = None,
        handles: Sequence[int] = (),
    ) -> asyncio.Future[int] | None:
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


# A job's child processes are found by descent or by their mark (`processes`), daemonised or not.

KILL_S = 5.0
GPU_WATCH_S = 1.0  # longest delay of a job's end by a killed GPU watch that a faulty driver holds
LOOK_S = 0.05

# Variables from a host's profile that torchrun would obey (it reads PET_* as its own options).
_UNSET = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_UNSET_PREFIXES = ("PET_", "TORCHELASTIC_", "ORCH_")


class Children:
    def __init__(self, job: JobFolder, node: dict[str, Any], attempt: int) -> None:
        self._job, self._node, self._attempt = job, node, attempt
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._gpu_watch = self._killed_group = 0
        # The host's own limits: ours are raised (`link`).
        self._descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)

    def start(
        self,
        argv: list[str],
        log: Any,
        folder: Path,
        environment: dict[str, str] | None = None,
        handles: Sequence[int] = (),
    ) -> asyncio.Future[int]:
        """Starts a child in a session of its own that dies with us. Returns its future exit code, negative for a
        signal.

        handles: descriptors to inherit with their numbers.
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
        child.returncode = 0  # `reap` collects it; Popen must not wait too
        ended = self._exits[child.pid] = asyncio.get_running_loop().create_future()
        return ended

    def _prepare(self) -> None:
        die_with_parent(signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._descriptors)

    def environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in _UNSET and not name.startswith(_UNSET_PREFIXES)
        }
        own = {MARK: str(self._job.root), "ORCH_JOB": self._job.id, "ORCH_NODE": self._node["name"]}
        own |= {"ORCH_ATTEMPT": str(self._attempt)} if self._attempt > 1 else {}
        # The job's own code comes first: the script's folder and the packages shipped with it.
        given = {**inherited, **self._node["env"]}
        path = [str(self._job.src), *filter(None, [given.get("PYTHONPATH")]), str(self._job.bin)]
        return {**given, **own, "PYTHONPATH": os.pathsep.join(path)}

    def watch_gpus(self) -> None:
        if self._node["gpu_uuids"]:
            argv = [sys.executable, "-S", "-m", "orch_remote.gpus", str(self._job.root)]
            # The job's code must not hide modules of the standard library.
            environment = {**self.environment(), "PYTHONPATH": str(self._job.bin)}
            try:
                self.start(argv, sys.stderr, self._job.bin, environment)
            except OSError as error:  # the job runs without readings
                sys.stderr.write(f"GPU use is unknown: {answer.words(error)}\n")
            else:
                self._gpu_watch = next(reversed(self._exits))

    def end_gpu_watch(self) -> None:
        if self._gpu_watch in self._exits:  # not reaped yet, so the group is still its own
            self._killed_group = self._gpu_watch
            os.killpg(self._killed_group, signal.SIGKILL)

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._exits:
                    self._exits.pop(pid).set_result(os.waitstatus_to_exitcode(status))

    async def end_all_of_it(self, wrappers: Callable[[], set[int]]) -> list[str]:
        """Ends all processes in steps: INT to the ranks (TERM to scripts that handle it: `rank`), TERM to all, KILL to
        all.

        wrappers: pids of the rank wrappers. Returns processes that did not end.
        """
        self.end_gpu_watch()
        grace_s = self._node["grace_s"]
        for signum in (signal.SIGINT, signal.SIGTERM):
            if not self._remaining():
                break
            # torchrun would answer INT by killing its workers; ranks get their grace first.
            first = wrappers()
            ranks = [process for process in self._remaining() if process.pid in first]
            end_all(ranks if signum == signal.SIGINT and ranks else self._remaining(), signum)
            await until(lambda: not self._remaining(), grace_s)
        killing = Killing()
        await until(lambda: not self._remaining(), KILL_S, lambda: killing.of(self._remaining()))
        await until(lambda: not below_or_marked(self._job.root), GPU_WATCH_S)
        return [describe(process) for process in below_or_marked(self._job.root)]

    def _remaining(self) -> list[Identity]:
        # Processes to end, without the killed GPU watch, which a faulty driver may hold for long.
        return [one for one in below_or_marked(self._job.root) if process_group(one.pid) != self._killed_group]


async def until(condition: Callable[[], bool], timeout_s: float, meanwhile: Callable[[], None] | None = None) -> bool:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() >= deadline:
            return False
        if meanwhile:
            meanwhile()
        await asyncio.sleep(LOOK_S)
    return True


# Explains a process's failure by its exit code, its log and the kernel's count of out-of-memory kills.

OUT_OF_MEMORY = "this host, or the cgroup that it runs in, ran out of memory, and the kernel ended a process"


class FailureDiagnosis:
    def __init__(self, node: str) -> None:
        self._node = node
        self._memory_kills = out_of_memory_kills()

    def forget_memory_kills(self) -> None:
        self._memory_kills = out_of_memory_kills()

    def of_program(self, kind: str, reason: str, log: Path, code: int) -> Failure:
        """code: exit code, negative for a signal. log: where to look for the cause."""
        cause = failure(kind, self._node, reason)
        cause["exit_code"] = code if code > 0 else None
        cause["signal"] = signal_name(-code) if code < 0 else None
        return self._explained(cause, log)

    def of_rank(self, event: dict[str, Any], log: Path) -> Failure:
        """event: the rank's end as its wrapper reports it (`rank`). Raises KeyError if malformed."""
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
        # A process killed from outside logs no reason; a process that aborts (NCCL's watchdog) has logged it before.
        if cause["signal"] in (None, "SIGABRT"):
            lines = log_tail(log) if log else []
            cause["log_line"], cause["secondary"] = telling_line(lines), is_secondary(lines)
            if known := advice(lines):
                cause["reason"] += f": {known}"
        return cause


def how_it_ended(code: int) -> str:
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited {code}"
