"""A short all-reduce over all hosts, as a job like any other; where it fails, the host or the pair that it fails with.

    found = smoke(controller, cluster, names, show)
    found.failure, found.guilty             "rank 2 exited with code 1", ("gamma",)

What no check can see by itself fails here, as it would in a training: packages, code, rendezvous, the back end.
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
"""Of one try. Most of it is torch's, which a cold disk may take half a minute to load."""
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
    """What was seen, and what became of the all-reduce."""
    return replace(
        seen, collective=smoke(controller, cluster, [host.name for host in seen.hosts], _backends(seen), show)
    )


def _backends(seen: Observations) -> tuple[str, ...]:
    """Gloo first: what it finds is no fault of NCCL's."""
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
    """show: told what begins."""
    for backend in backends:
        tries, blamed = _Tries(controller, cluster, backend, show), tuple[str, ...]()
        if words := tries.on(names):
            with suppress(_TooManyError):
                blamed = guilty(names, tries.fails) if len(names) > 2 else ()
            return Collective(tuple(backends), backend, words, blamed, tries.first)
    return Collective(tuple(backends))


class _TooManyError(Exception):
    """It was tried often enough."""


class _Tries:
    """The all-reduce on some of the hosts, by one back end."""

    def __init__(self, controller: Controller, cluster: Cluster, backend: str, show: Callable[[str], None]) -> None:
        self.first: str | None = None
        """The id of the first of its jobs."""
        self._controller, self._cluster, self._show, self._count = controller, cluster, show, 0
        settings = {**SETTINGS, "backend": backend}
        self._job = parse_job(JobSpec.model_validate({"exp": "collectives", "settings": settings, "name": "doctor"}))
        self._backend = backend

    def fails(self, names: Sequence[str]) -> bool:
        """One host alone has nobody to reduce with. Raises _TooManyError."""
        if len(names) < 2:
            return False
        if self._count >= MOST_TRIES:
            raise _TooManyError
        return bool(self.on(names))

    def on(self, names: Sequence[str]) -> str:
        """Why it fails with these; "" where it does not."""
        self._count += 1
        self._show(f"an all-reduce by {self._backend} on {', '.join(names)}")
        try:
            plan = self._controller.choice.plan(self._cluster, self._job.request, self._job.code, names)
            job = self._controller.launch(plan, self._job.blob)
        except HostsError as error:
            return "; ".join(one.message for one in error.errors)
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
