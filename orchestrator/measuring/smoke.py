"""A short all-reduce over all hosts as a normal job; if it fails, the host or pair at fault. Finds problems that no
single check sees: packages, code, rendezvous, back end.

    found = smoke(controller, cluster, names, show)
    found.failure, found.guilty             "rank 2 exited with code 1", ("gamma",)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from orchestrator.controller import Controller
from orchestrator.doctor.look import guilty
from orchestrator.doctor.observations import Collective, Observations
from orchestrator.errors import HostError, HostsError, OrchError
from orchestrator.hosts.cluster import Cluster
from orchestrator.jobs.job_store import FINAL_STATES
from orchestrator.jobs.running import RunningJob
from orchestrator.planning.job_spec import JobSpec
from orchestrator.planning.request import parse_job

LIMIT_S = 60.0
"""Per try. A cold disk may take half a minute to load torch."""
MOST_TRIES = 16
SETTINGS = {
    "operations": "all_reduce",
    "min_bytes": str(1 << 10),
    "max_bytes": str(8 << 20),
    "factor": str(1 << 13),
    "iterations": "3",
    "links": "false",
    "budget_s": "10",
}
"""1 KiB and 8 MiB; each result is checked."""


def with_smoke(
    controller: Controller, cluster: Cluster, seen: Observations, show: Callable[[str], None]
) -> Observations:
    """Adds the result of the all-reduce."""
    return replace(
        seen, collective=smoke(controller, cluster, [host.name for host in seen.hosts], _backends(seen), show)
    )


def _backends(seen: Observations) -> tuple[str, ...]:
    """Gloo first: its failures are not NCCL's."""
    torches = [host.facts.torch for host in seen.hosts if host.trains_on_gpus and host.facts.torch]
    on_nccl = len(torches) == len(seen.hosts) and all(torch.nccl_available for torch in torches)
    return ("gloo", "nccl") if on_nccl else ("gloo",)


def smoke(
    controller: Controller,
    cluster: Cluster,
    names: Sequence[str],
    backends: Sequence[str],
    show: Callable[[str], None] = lambda words: None,
) -> Collective:
    """show: gets a line before each try."""
    for backend in backends:
        tries, blamed = _Tries(controller, cluster, backend, show), tuple[str, ...]()
        if words := tries.on(names):
            with suppress(_TooManyError):
                blamed = guilty(names, tries.fails) if len(names) > 2 else ()
            return Collective(tuple(backends), backend, words, blamed, tries.first)
    return Collective(tuple(backends))


class _TooManyError(Exception):
    pass


class _Tries:
    def __init__(self, controller: Controller, cluster: Cluster, backend: str, show: Callable[[str], None]) -> None:
        self.first: str | None = None
        """The first job's id."""
        self._controller, self._cluster, self._show, self._count = controller, cluster, show, 0
        settings = {**SETTINGS, "backend": backend}
        self._job = parse_job(JobSpec.model_validate({"exp": "collectives", "settings": settings, "name": "doctor"}))
        self._backend = backend

    def fails(self, names: Sequence[str]) -> bool:
        """A single host has no partner. Raises _TooManyError."""
        if len(names) < 2:
            return False
        if self._count >= MOST_TRIES:
            raise _TooManyError
        return bool(self.on(names))

    def on(self, names: Sequence[str]) -> str:
        """The reason of the failure, or ""."""
        self._count += 1
        self._show(f"an all-reduce by {self._backend} on {', '.join(names)}")
        try:
            plan = self._controller.choice.plan(self._cluster, self._job.request, self._job.code, names)
            job = self._controller.launch(plan, self._job.blob)
        except HostsError as error:
            return "; ".join(each.message for each in error.errors)
        except (HostError, OrchError) as error:
            return error.message
        self.first = self.first or job.id
        try:
            return _to_its_end(job)
        finally:
            self._controller.store.nothing_to_collect(job.id)


def _to_its_end(job: RunningJob) -> str:
    until_s = time.monotonic() + LIMIT_S
    try:
        for _ in job.follow(wanted=lambda: time.monotonic() < until_s):
            pass
    finally:  # a Ctrl-C, too
        if job.record.state not in FINAL_STATES:
            job.cancel()
    record = job.record
    if record.state == "succeeded":
        return ""
    if why := record.first_failure:
        return f"{why.node}: {why.reason}" + (f" ({why.log_line})" if why.log_line else "")
    return f"it had not ended after {LIMIT_S:.0f} s" if record.state == "cancelled" else f"the job {record.state}"
