"""The list of remembered jobs with their current states from the hosts, and the recovery of jobs that this $ORCH_HOME
lost.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator.errors import HostError, OrchError, StateError
from orchestrator.hosts import work_folders
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.work_folders import Who
from orchestrator.jobs import launch
from orchestrator.jobs.job_store import ENDED, JobRecord, JobStore
from orchestrator.jobs.stall import needs_diagnosis
from orchestrator.jobs.state import combine
from orchestrator.owner import read_owner
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.record import SCHEMA, Owner
from orchestrator.transport.fanout import errors_by_node, values
from orchestrator.units import clean, counted

if TYPE_CHECKING:
    from orchestrator.jobs.running import RunningJob


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
        found = self._jobs.find_job(wanted, cluster)
        self._jobs.job_record(found)  # a damaged record is reported before its plan is read
        return self.of(self._jobs.plan(found))

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

    def _known(self) -> list[str]:
        damaged = self._jobs.damaged()
        sound = [job_id for job_id in self._jobs.job_ids() if job_id not in damaged]
        return [*sound, *(job_id for job_id, error in damaged.items() if not isinstance(error, StateError))]

    def _rebuilt(self, plan: LaunchPlan, answers: Mapping[str, Mapping[str, Any]]) -> JobRecord:
        agents: dict[str, Mapping[str, Any] | HostError] = {**agents_of(plan.job, plan, answers)}
        record = combine(plan, agents, JobRecord.of(plan, "lost"), datetime.now(timezone.utc))
        self._jobs.save_job(record, plan)
        if plan.owner != read_owner(self._jobs.home):  # `orch down` removes no other owner's files
            self._jobs.nothing_to_collect(record.id)
        return record

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


# Plans that come from hosts are checked before use. They serve logs, cancel and collect; nothing is launched from them.
# Python and folders come from the inventory, numbers are bounded, and texts lose their control characters.

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_RANKS = 1 << 16
MAX_GRACE_S = 3600.0


class OtherCluster(ValueError):
    """Another cluster uses the same hosts; this is no error."""


@dataclass(frozen=True)
class Recalled:
    plans: dict[str, LaunchPlan]
    left_out: list[str]
    elsewhere: dict[str, list[str]]
    """By cluster."""


def recall(answers: Mapping[str, Mapping[str, Any]], cluster: Cluster) -> Recalled:
    """answers: by node, from `recall` of `remote/control.py`."""
    plans, left_out, elsewhere = dict[str, LaunchPlan](), list[str](), dict[str, list[str]]()
    for node, jobs in answers.items():
        for job, remembered in jobs.items():
            if job in plans:
                continue
            try:
                plan = adopt(remembered["plan"], cluster, node=node, job=job)
                plans[job] = plan.model_copy(update={"owner": _owner(remembered.get("agent"))})
            except OtherCluster as other:
                jobs_there = elsewhere.setdefault(str(other), [])
                jobs_there += [] if job in jobs_there else [clean(str(job))[:128]]
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
                left_out.append(f"{node}: job {clean(str(job))[:128]} is skipped: {_why(error)}")
    return Recalled(plans, left_out, elsewhere)


def adopt(record: Any, cluster: Cluster, *, node: str, job: str) -> LaunchPlan:
    """Raises ValueError if the plan contradicts the inventory or itself."""
    if record["schema"] > SCHEMA:
        raise ValueError(f"written by a newer orch, schema {record['schema']}: update this one")
    plan = LaunchPlan.model_validate(_cleaned(record))
    if not JOB_ID.fullmatch(job) or plan.job != job:
        raise ValueError("it names another job")
    if plan.cluster != cluster.name:
        raise OtherCluster(plan.cluster[:64])
    names = [planned.name for planned in plan.nodes]
    unknown = set(names) - {node.name for node in cluster.nodes}
    if unknown:
        raise ValueError(f"cluster {cluster.name} has no node {', '.join(sorted(unknown))[:200]}")
    if len(set(names)) < len(names) or node not in names or plan.master not in names:
        raise ValueError("its nodes contradict each other")
    _check_numbers(plan)
    nodes = []
    for planned in plan.nodes:
        here = cluster.node(planned.name)
        where = {"python": here.python, "activate": here.activate, "workdir": here.workdir}
        nodes.append(planned.model_copy(update=where))
    return plan.model_copy(update={"nodes": tuple(nodes)})


def agents_of(job: str, plan: LaunchPlan, answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """By node that answered: its supervisor's record, or {}."""
    found = {}
    for node in plan.nodes:
        if node.name in answers:
            remembered = answers[node.name].get(job)
            agent = remembered.get("agent") if isinstance(remembered, Mapping) else None
            found[node.name] = agent if isinstance(agent, Mapping) else {}
    return found


def _owner(agent: Any) -> Owner | None:
    """From node.json, which changes when a job is taken over; the plan does not change."""
    owner = agent.get("owner") if isinstance(agent, Mapping) else None
    return Owner.model_validate(_cleaned(owner)) if owner else None


def _check_numbers(plan: LaunchPlan) -> None:
    first = 0
    for node in plan.nodes:
        if not 0 < node.ranks <= MAX_RANKS or node.first_rank != first:
            raise ValueError("its ranks contradict each other")
        first += node.ranks
    if first != plan.world_size:
        raise ValueError("its ranks contradict each other")
    if not math.isfinite(plan.grace_s) or not 0 <= plan.grace_s <= MAX_GRACE_S:
        raise ValueError(f"a grace of {plan.grace_s} s")
    if datetime.fromisoformat(plan.created).tzinfo is None:
        raise ValueError("a time of creation without a time zone")


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(str(key)): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return value


def _why(error: Exception) -> str:
    lines: Iterable[str] = str(error).splitlines() or [type(error).__name__]
    return clean(next(iter(lines)))[:200]
