"""The list of remembered jobs with their current states from the hosts, and the recovery of jobs that this $ORCH_HOME
lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from orchestrator.errors import HostError, OrchError, StateError
from orchestrator.hosts import work_folders
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.work_folders import Who
from orchestrator.jobs import launch
from orchestrator.jobs.job_store import ENDED, JobRecord, JobStore, QueuedError
from orchestrator.jobs.recalled_plans import agents_of, recall
from orchestrator.jobs.stall import needs_diagnosis
from orchestrator.jobs.state import combine
from orchestrator.owner import read_owner
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.record import Owner
from orchestrator.transport.fanout import errors_by_node, values
from orchestrator.units import counted

if TYPE_CHECKING:
    from orchestrator.jobs.running import RunningJob
    from orchestrator.jobs.slurm_queue import SlurmQueue


@dataclass(frozen=True)
class Jobs:
    records: tuple[JobRecord, ...]
    """Newest first."""
    problems: Mapping[str, OrchError]
    """By job, cluster or host."""
    unheard: Mapping[str, Mapping[str, HostError]]
    """By job that may still run: its hosts that did not answer."""


class JobList:
    def __init__(self, jobs: JobStore, connections: Connections) -> None:
        self._jobs, self._connections = jobs, connections

    def find(self, wanted: str, cluster: str | None = None) -> RunningJob:
        """Raises QueuedError for a job that waits for Slurm."""
        found = self._jobs.find_job(wanted, cluster)
        record = self._jobs.job_record(found)  # a damaged record is reported before its plan is read
        if record.was_queued:
            record = self.slurm.refreshed(record)
        if record.was_queued:
            raise QueuedError(record)
        return self.of(self._jobs.plan(found))

    @cached_property
    def slurm(self) -> SlurmQueue:
        from orchestrator.jobs.slurm_queue import SlurmQueue

        return SlurmQueue(self._jobs, self._connections)

    def sound(self, records: Iterable[JobRecord]) -> list[RunningJob]:
        """Without jobs whose plan is damaged: `Jobs.problems` has them."""
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
        """silent: nodes that did not answer a moment ago and are not dialled again. why: diagnose stalls that have no
        diagnosis yet.
        """
        records, problems = self._jobs.listed()
        if lent := [record for record in records if record.slurm and not record.slurm.is_over]:
            for record in lent:
                with suppress(OrchError):  # it is listed as it was
                    self.slurm.refreshed(record)
            records, problems = self._jobs.listed()
        found, unheard = [], dict[str, Mapping[str, HostError]]()
        for record in records:
            if cluster in (None, record.cluster):
                try:
                    asks = record.id not in problems and record.state not in ENDED and not record.was_queued
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
        running = self.of(self._jobs.plan(job))
        record, away = running.asked_after(silent)
        if why and not away and needs_diagnosis(record):
            record = running.ask_why()
        return record, away

    def settle_half_starts(self) -> None:
        """Undoes starts whose controller died: they hold GPUs, and no controller will start them."""
        for half in self._jobs.half_started():
            shutil.rmtree(self._jobs.home.carried(half), ignore_errors=True)
            if half not in self._jobs.job_ids():  # it died before it had asked any host
                self._jobs.start_is_over(half)
            with suppress(OrchError):  # a damaged record, a host that does not answer: the next command tries again
                self.of(self._jobs.plan(half)).refresh()


# Recovery: asks the hosts of a cluster for jobs that are unknown or damaged here, and takes over jobs of other homes.


@dataclass
class Rescanned:
    records: tuple[JobRecord, ...] = ()
    problems: dict[str, OrchError] = field(default_factory=dict)
    """By job, cluster or host."""
    notices: tuple[str, ...] = ()


class JobRecovery:
    def __init__(self, jobs: JobStore, connections: Connections) -> None:
        self._jobs, self._connections = jobs, connections

    def rescan(self, clusters: Sequence[str]) -> Rescanned:
        """Remembers every job on these hosts that is unknown or damaged here."""
        rescanned = Rescanned()
        for name in clusters:
            try:
                self._rescan(self._jobs.cluster(name), rescanned, clusters)
            except StateError as error:
                rescanned.problems[name] = error
        for job_id, lost in self._jobs.damaged().items():
            if isinstance(lost, StateError):
                folder = self._jobs.home.job_folder(job_id)
                remedy = f"no host that answered has it; remove {folder} to forget it"
                rescanned.problems[job_id] = StateError(lost.message, remedy)
        return rescanned

    def _rescan(self, cluster: Cluster, rescanned: Rescanned, asked_too: Sequence[str]) -> None:
        """asked_too: jobs of any other cluster found on these hosts become a notice."""
        known = self._known()
        if cluster.engine:
            return self._rescan_slurm(cluster, rescanned, known)
        asked = self._connections.each(
            cluster.nodes, lambda host: launch.recall(host, known), deadline_s=launch.RECALL_S
        )
        answers = values(asked)
        rescanned.problems |= errors_by_node(asked)
        recalled = recall(answers, cluster)
        for other, jobs in recalled.elsewhere.items():
            if other not in asked_too:
                words = f"skipped {counted(len(jobs), 'job')} of cluster {other} on the hosts of {cluster.name}"
                rescanned.notices += (words,)
        for number, words in enumerate(recalled.left_out):
            rescanned.problems[f"{cluster.name} {number}"] = OrchError(words, "it stays on its host, untouched")
        rescanned.records += tuple(self._rebuilt(plan, answers) for plan in recalled.plans.values())
        return None

    def _rescan_slurm(self, cluster: Cluster, rescanned: Rescanned, known: Sequence[str]) -> None:
        """Asks the login host: hosts are reachable only within a job."""
        from orchestrator.jobs.slurm_queue import SlurmQueue

        try:
            for found in SlurmQueue(self._jobs, self._connections).recovered(cluster, known):
                if isinstance(found, OrchError):
                    rescanned.problems[f"{cluster.name} {len(rescanned.problems)}"] = found
                elif isinstance(found, JobRecord):
                    rescanned.records += (found,)
                else:
                    self._spare_others(found)
                    rescanned.records += (self._jobs.job_record(found.job),)
        except HostError as error:
            rescanned.problems[error.node] = error

    def _known(self) -> list[str]:
        damaged = self._jobs.damaged()
        sound = [job_id for job_id in self._jobs.job_ids() if job_id not in damaged]
        return [*sound, *(job_id for job_id, error in damaged.items() if not isinstance(error, StateError))]

    def _rebuilt(self, plan: LaunchPlan, answers: Mapping[str, Mapping[str, Any]]) -> JobRecord:
        agents: dict[str, Mapping[str, Any] | HostError] = {**agents_of(plan.job, plan, answers)}
        record = combine(plan, agents, JobRecord.of(plan, "lost"), datetime.now(timezone.utc))
        self._jobs.save_job(record, plan)
        self._spare_others(plan)
        return record

    def _spare_others(self, plan: LaunchPlan) -> None:
        if plan.owner != read_owner(self._jobs.home):  # `orch down` removes no other owner's files
            self._jobs.nothing_to_collect(plan.job)

    def not_ours(self, clusters: Sequence[str]) -> dict[Owner | None, list[str]]:
        """By owner (None: an older orch, which recorded no owner)."""
        by_owner, own = dict[Owner | None, list[str]](), read_owner(self._jobs.home)
        for record in self._jobs.jobs():
            with suppress(OrchError):
                owner = self._jobs.plan(record.id).owner
                if record.cluster in clusters and owner != own:
                    by_owner.setdefault(owner, []).append(record.id)
        return by_owner

    def adopt(self, jobs: Sequence[str]) -> dict[str, HostError]:
        """Makes this home the jobs' owner on their hosts. Returns the hosts that failed."""
        owner, failed = read_owner(self._jobs.home), dict[str, HostError]()
        plans = [self._jobs.plan(wanted) for wanted in jobs]
        for name in {plan.cluster for plan in plans}:
            ours = [plan for plan in plans if plan.cluster == name]
            missed = self._adopt_on_hosts(self._jobs.cluster(name), owner, [plan.job for plan in ours])
            failed |= missed
            for plan in ours:
                if not missed.keys() & {node.name for node in plan.nodes}:
                    self._jobs.save_job(self._jobs.job_record(plan.job), plan.model_copy(update={"owner": owner}))
        return failed

    def _adopt_on_hosts(self, cluster: Cluster, owner: Owner, jobs: Sequence[str]) -> dict[str, HostError]:
        take_over = partial(work_folders.adopt, who=Who(owner, cluster.name), jobs=jobs)
        return errors_by_node(self._connections.each(cluster.nodes, take_over, deadline_s=work_folders.CLEAR_S + 5))
