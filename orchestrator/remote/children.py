"""What a supervisor starts on its host, and how it ends all of it: torchrun, `prepare`, the watch over the GPUs.

    children = Children(job, node)
    ended = children.start([python, "-m", ...], log, folder)     # a future of its exit code
    leftovers = await children.end_all_of_it(wrappers)            # INT, TERM, KILL, and a second look

Whatever these start in turn is found by descent or by its mark (`processes`), daemonised or not.
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

from . import trouble
from .layout import JobFolder
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
)

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
        self._descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)  # the host's own limits: ours grow (`door`)

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
                sys.stderr.write(f"GPU use is unknown: {trouble.words(error)}\n")
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
