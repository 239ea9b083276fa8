"""The jobs that this $ORCH_HOME remembers, as their hosts have them now.

jobs = KnownJobs(store, connections)
jobs.find("latest")                     RunningJob; no host has been asked yet
jobs.all("rack").records                all of a cluster, each asked after that has not ended
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
from orchestrator.jobs.job_store import ENDED, JobRecord, RememberedJobs
from orchestrator.jobs.stall import asks_for_it
from orchestrator.jobs.state import combine
from orchestrator.owner import read_owner
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.record import SCHEMA, Owner
from orchestrator.text import clean
from orchestrator.transport.fanout import errors_by_node, values
from orchestrator.units import counted

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


# Jobs that this $ORCH_HOME has lost or never had: asked back from the hosts of a cluster, and taken over.
#
# LostJobs(jobs, connections).rescan(["rack"])                the jobs that were rebuilt, and what could not be
# lost.not_ours(["rack"])                                     those of them that another home started
# lost.adopt([...])                                           ... are this home's from now on


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
        """Jobs that need not be asked for: sound ones, and those that a newer orch wrote."""
        damaged = self._jobs.damaged()
        sound = [job_id for job_id in self._jobs.job_ids() if job_id not in damaged]
        return [*sound, *(job_id for job_id, error in damaged.items() if not isinstance(error, StateError))]

    def _rebuilt(self, plan: LaunchPlan, answers: Mapping[str, Mapping[str, Any]]) -> JobRecord:
        agents: dict[str, Mapping[str, Any] | HostError] = {**agents_of(plan.job, plan, answers)}
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
        take_over = partial(work_folders.adopt, who=Who(owner, cluster.name), jobs=jobs)
        return errors_by_node(self._connections.each(cluster.nodes, take_over, deadline_s=work_folders.CLEAR_S + 5))


# Rebuilds what this controller lost of its jobs from what their hosts remember. Pure.
#
#     plan = adopt(answer["plan"], cluster, node="v100", job="mnist_lenet-20261121-0912-k3f")
#     record = JobRecord.of(plan, "lost")     # `state.combine` then finds its state
#
# No host is taken at its word. A plan that comes from one is for reading only (logs, cancel, collect): nothing is ever
# launched from it. Where the job's hosts are and how Python starts there is the inventory's word, everything that is
# counted to or waited for is bounded, and texts lose their control characters.

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_RANKS = 1 << 16
MAX_GRACE_S = 3600.0


class OtherCluster(ValueError):
    """A job of another cluster on the same hosts: nothing is wrong with it."""


@dataclass(frozen=True)
class Recalled:
    """What the hosts of a cluster remember of its jobs."""

    plans: dict[str, LaunchPlan]
    """By job."""
    left_out: list[str]
    """What did not fit, and why."""
    elsewhere: dict[str, list[str]]
    """By other cluster, its jobs on these hosts."""


def recall(answers: Mapping[str, Mapping[str, Any]], cluster: Cluster) -> Recalled:
    """answers: per node, the jobs that `recall` of `remote/control.py` found."""
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
    """The plan that this node gave for this job, checked. Raises ValueError for what does not fit."""
    if record["schema"] > SCHEMA:
        raise ValueError(f"written by a newer orch, schema {record['schema']}: update this one")
    plan = LaunchPlan.model_validate(_cleaned(record))
    if not JOB_ID.fullmatch(job) or plan.job != job:
        raise ValueError("it names another job")
    if plan.cluster != cluster.name:
        raise OtherCluster(plan.cluster[:64])
    names = [planned.name for planned in plan.nodes]
    strangers = set(names) - {known.name for known in cluster.nodes}
    if strangers:
        raise ValueError(f"cluster {cluster.name} has no node {', '.join(sorted(strangers))[:200]}")
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
    """Per node of the job that answered: its supervisor's record; {} where the host knows nothing of it."""
    found = {}
    for node in plan.nodes:
        if node.name in answers:
            remembered = answers[node.name].get(job)
            agent = remembered.get("agent") if isinstance(remembered, Mapping) else None
            found[node.name] = agent if isinstance(agent, Mapping) else {}
    return found


def _owner(agent: Any) -> Owner | None:
    """Whose it is by node.json, which knows when it was taken over; the plan beside it does not."""
    owner = agent.get("owner") if isinstance(agent, Mapping) else None
    return Owner.model_validate(_cleaned(owner)) if owner else None


def _check_numbers(plan: LaunchPlan) -> None:
    """Everything that is counted to or waited for."""
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
