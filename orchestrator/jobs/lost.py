"""Jobs that this $ORCH_HOME has lost or never had: asked back from the hosts of a cluster, and taken over.

LostJobs(jobs, connections).rescan(["rack"])                the jobs that were rebuilt, and what could not be
lost.not_ours(["rack"])                                     those of them that another home started
lost.adopt([...])                                           ... are this home's from now on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any

from orchestrator.errors import HostError, OrchError, StateError
from orchestrator.hosts import belongings
from orchestrator.hosts.belongings import Who
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.connections import Connections
from orchestrator.jobs import control, rescan
from orchestrator.jobs.record import JobRecord
from orchestrator.jobs.remembered import RememberedJobs
from orchestrator.jobs.state import combine
from orchestrator.owner import read_owner
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.record import Owner
from orchestrator.transport.fanout import errors_by_node, values
from orchestrator.units import counted


@dataclass
class Rescanned:
    """What was found again on the hosts."""

    records: tuple[JobRecord, ...] = ()
    """The jobs that were rebuilt."""
    problems: dict[str, OrchError] = field(default_factory=dict)
    """By job, cluster or host, what could not be read or asked."""
    notices: tuple[str, ...] = ()


class LostJobs:
    def __init__(self, jobs: RememberedJobs, connections: Connections) -> None:
        self._jobs, self._connections = jobs, connections

    def rescan(self, clusters: Sequence[str]) -> Rescanned:
        """Asks every host of these clusters for jobs that are unknown or damaged here, and remembers them again."""
        rescanned = Rescanned()
        for name in clusters:
            try:
                self._rescan(self._jobs.cluster(name), rescanned, clusters)
            except StateError as error:
                rescanned.problems[name] = error
        for job_id, lost in self._jobs.damaged().items():
            if isinstance(lost, StateError):
                folder = self._jobs.home.job_folder(job_id)
                remedy = f"no host that answered knows it; remove {folder} to forget it"
                rescanned.problems[job_id] = StateError(lost.message, remedy)
        return rescanned

    def _rescan(self, cluster: Cluster, rescanned: Rescanned, asked_too: Sequence[str]) -> None:
        """asked_too: clusters that are asked as well; a job of another one that lies here is named."""
        known = self._known()
        asked = self._connections.each(
            cluster.nodes, lambda host: control.recall(host, known), deadline_s=control.RECALL_S
        )
        answers = values(asked)
        rescanned.problems |= errors_by_node(asked)
        recalled = rescan.recall(answers, cluster)
        for other, jobs in recalled.elsewhere.items():
            if other not in asked_too:
                words = f"skipped {counted(len(jobs), 'job')} of cluster {other} on the hosts of {cluster.name}"
                rescanned.notices += (words,)
        for number, words in enumerate(recalled.left_out):
            rescanned.problems[f"{cluster.name} {number}"] = OrchError(words, "it stays on its host, untouched")
        rescanned.records += tuple(self._rebuilt(plan, answers) for plan in recalled.plans.values())

    def _known(self) -> list[str]:
        """Jobs that need not be asked for: sound ones, and those that a newer orch wrote."""
        damaged = self._jobs.damaged()
        sound = [job_id for job_id in self._jobs.job_ids() if job_id not in damaged]
        return [*sound, *(job_id for job_id, error in damaged.items() if not isinstance(error, StateError))]

    def _rebuilt(self, plan: LaunchPlan, answers: Mapping[str, Mapping[str, Any]]) -> JobRecord:
        agents: dict[str, Mapping[str, Any] | HostError] = {**rescan.agents_of(plan.job, plan, answers)}
        record = combine(plan, agents, JobRecord.of(plan, "lost"), datetime.now(timezone.utc))
        self._jobs.save_job(record, plan)
        if plan.owner != read_owner(self._jobs.home):  # `orch down` takes it from nobody
            self._jobs.nothing_to_collect(record.id)
        return record

    def not_ours(self, clusters: Sequence[str]) -> dict[Owner | None, list[str]]:
        """The remembered jobs of these clusters that another home started; None: an older orch, which left no name."""
        by_owner, own = dict[Owner | None, list[str]](), read_owner(self._jobs.home)
        for record in self._jobs.jobs():
            with suppress(OrchError):
                owner = self._jobs.plan(record.id).owner
                if record.cluster in clusters and owner != own:
                    by_owner.setdefault(owner, []).append(record.id)
        return by_owner

    def adopt(self, jobs: Sequence[str]) -> dict[str, HostError]:
        """Makes these remembered jobs ours, on every host of theirs; gives the hosts where that could not be done."""
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
        take_over = partial(belongings.adopt, who=Who(owner, cluster.name), jobs=jobs)
        return errors_by_node(self._connections.each(cluster.nodes, take_over, deadline_s=belongings.CLEAR_S + 5))
