"""The jobs that this $ORCH_HOME remembers, as their hosts have them now.

jobs = KnownJobs(store, connections)
jobs.find("latest")                     RunningJob; no host has been asked yet
jobs.all("rack").records                all of a cluster, each asked after that has not ended
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.errors import HostError, OrchError, StateError
from orchestrator.hosts.connections import Connections
from orchestrator.jobs.record import ENDED, JobRecord
from orchestrator.jobs.remembered import RememberedJobs
from orchestrator.jobs.stall import asks_for_it
from orchestrator.planning.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from orchestrator.jobs.running import RunningJob


@dataclass(frozen=True)
class Jobs:
    """The jobs that are remembered, as their hosts report them now."""

    records: tuple[JobRecord, ...]
    """Newest first."""
    problems: Mapping[str, OrchError]
    """By job, cluster or host, what could not be read or asked."""
    unheard: Mapping[str, Mapping[str, HostError]]
    """By job that may still run, its hosts that gave no answer. Its record is what the others say, or what was known
    before.
    """


class KnownJobs:
    def __init__(self, jobs: RememberedJobs, connections: Connections) -> None:
        self._jobs, self._connections = jobs, connections

    def find(self, wanted: str, cluster: str | None = None) -> RunningJob:
        """wanted, cluster: as `RememberedJobs.find_job` takes them."""
        found = self._jobs.find_job(wanted, cluster)
        self._jobs.job_record(found)  # a damaged one is reported before its plan is read
        return self.of(self._jobs.plan(found))

    def sound(self, records: Iterable[JobRecord]) -> list[RunningJob]:
        """Those of them whose plan can be read; `Jobs.problems` says what is wrong with the others."""
        found = []
        for record in records:
            with suppress(StateError):
                found.append(self.of(self._jobs.plan(record.id)))
        return found

    def of(self, plan: LaunchPlan) -> RunningJob:
        from orchestrator.jobs.running import RunningJob  # a list of ended jobs does without

        return RunningJob(plan, self._jobs, self._connections)

    def all(
        self, cluster: str | None = None, silent: Mapping[str, HostError] | None = None, *, why: bool = False
    ) -> Jobs:
        """All remembered jobs, newest first, as their hosts have them now; one that cannot be asked after keeps its
        record. silent: nodes of this cluster that were found not to answer a moment ago, and are not dialled again.
        why: asks those that print nothing who holds them up, where nobody has.
        """
        records, problems = self._jobs.listed()
        found, unheard = [], dict[str, Mapping[str, HostError]]()
        for record in records:
            if cluster in (None, record.cluster):
                try:
                    asks = record.id not in problems and record.state not in ENDED
                    now, away = self._asked_after(record.id, silent, why) if asks else (record, {})
                    if away and now.state not in ENDED:
                        unheard[now.id] = away
                    found.append(now)
                except OrchError as error:  # its cluster is damaged or forgotten
                    found.append(record)
                    problems[record.id] = error
        return Jobs(tuple(found), problems, unheard)

    def _asked_after(
        self, job: str, silent: Mapping[str, HostError] | None, why: bool
    ) -> tuple[JobRecord, Mapping[str, HostError]]:
        one = self.of(self._jobs.plan(job))
        record, away = one.asked_after(silent)
        if why and not away and asks_for_it(record):
            record = one.ask_why()
        return record, away

    def settle_half_starts(self) -> None:
        """A job that a controller left half started when it died holds GPUs, and nobody will ever start it."""
        for half in self._jobs.half_started():
            shutil.rmtree(self._jobs.home.carried(half), ignore_errors=True)
            if half not in self._jobs.job_ids():  # it died before it had asked any host
                self._jobs.start_is_over(half)
            with suppress(OrchError):  # a damaged record, a host that is away: the next command tries again
                self.of(self._jobs.plan(half)).refresh()
