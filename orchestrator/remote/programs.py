"""What a supervisor runs on its host, the inventory's `prepare` command and then torchrun, and what their ends mean.

programs = Programs(job, node, state, drain, rendezvous)
await programs.prepare()                    # whether it went well, or there is none
await programs.run_torchrun(argv)           # until it ends
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import trouble
from .children import Children
from .failures import FailureDiagnosis, how_it_ended
from .host_state import HostState
from .layout import JobFolder
from .messages import Order, failure
from .plain_asyncio import asyncio
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
            reason = f"{_NAMES.get(kind, kind)} did not start: {trouble.describe(error)}"
            self._state.fail(failure(kind, self._node["name"], reason))
            return None


def _filled(part: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        part = part.replace("{" + name + "}", value)
    return part
