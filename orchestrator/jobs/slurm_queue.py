"""Jobs of a Slurm cluster before they have started, and after their hosts are gone: asks the login host.

    queue = SlurmQueue(store, connections)
    queue.refreshed(record)         # queued, or started: then it has a plan, like any other job

The batch step writes a line into `started` for every job of orch that it has started: a retry, or a resume after Slurm
has queued the job again, is a new one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import datetime, timezone

from pydantic import ValidationError

from orchestrator.errors import ConnectError, OrchError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.inventory import Allocation
from orchestrator.jobs import launch
from orchestrator.jobs.job_store import ENDED, FirstFailure, JobRecord, JobStore, SlurmLoan
from orchestrator.jobs.recalled_plans import recall
from orchestrator.jobs.state import ended_by
from orchestrator.owner import read_owner
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.record import Owner, Record, Words
from orchestrator.slurm.answers import SlurmJob
from orchestrator.slurm.login import SlurmLogin
from orchestrator.transport.ask import ConnectedHost

STARTED, QUEUED = "started", "queued.json"
LOOK_S = 2.0
ENDS_S = 90.0
"""Longest wait for Slurm to end a job's last processes (KillWait)."""


class Started(Record):
    """A line of `started`."""

    job: Words
    master: Words
    hosts: dict[str, Allocation]


class Queued(Record):
    """The content of `queued.json`: a job that a home which has lost it finds in Slurm's queue."""

    owner: Owner
    record: JobRecord


class SlurmQueue:
    def __init__(self, jobs: JobStore, connections: Connections) -> None:
        self._jobs, self._connections = jobs, connections

    def login(self, cluster: Cluster) -> SlurmLogin:
        """Raises HostError."""
        host = self._connections.kept(cluster.login)
        return SlurmLogin(host.transport, host.workdir)

    def state(self, record: JobRecord) -> SlurmJob:
        """Raises HostError."""
        assert record.slurm  # noqa: S101 - the caller's
        cluster = self._jobs.cluster(record.cluster)
        login = self.login(cluster)
        try:
            return login.job(record.slurm.job)
        except ConnectError:  # the connection may have been away for a while
            self._connections.reopen(cluster.login.name)
            return self.login(cluster).job(record.slurm.job)

    def settled(self, record: JobRecord) -> SlurmJob:
        """`state`, once Slurm no longer ends processes. Raises HostError."""
        until_s = time.monotonic() + ENDS_S
        while (found := self.state(record)).phase == "ending" and time.monotonic() < until_s:
            time.sleep(0.5)
        return found

    def refreshed(self, record: JobRecord) -> JobRecord:
        """Also remembers jobs that its Slurm job has started since. Raises OrchError."""
        loan = record.slurm
        assert loan  # noqa: S101 - the caller's
        if loan.is_over:
            return record
        found = self.state(record)  # first: what it started before its end is then in the file
        cluster = self._jobs.cluster(record.cluster)
        known = {job.id: job for job in self._jobs.jobs() if job.slurm and job.slurm.job == loan.job}
        for started in _started(self.login(cluster).text_of(loan.folder, STARTED)):
            if started.job not in known or known[started.job].was_queued:
                number = 0 if started.job in known else self._jobs.next_number()
                self._remember(cluster, started, loan, number)
        why = self.login(cluster).last_error(loan.folder) if found.is_over and record.was_queued else ""
        return self._jobs.change_job(record.id, lambda now: _now(now, found, cluster.login.name, why))

    def newest(self, record: JobRecord) -> JobRecord:
        """The latest job of the same Slurm job."""
        assert record.slurm  # noqa: S101 - the caller's
        of = [job for job in self._jobs.jobs() if job.slurm and job.slurm.job == record.slurm.job]
        return max(of, key=lambda job: (job.started or "", job.number))

    def cancel(self, record: JobRecord) -> JobRecord:
        """Takes it out of Slurm's queue, or ends its processes. Raises HostError."""
        assert record.slurm  # noqa: S101 - the caller's
        self.login(self._jobs.cluster(record.cluster)).cancel(record.slurm.job)
        self.settled(record)
        return self.refreshed(record)

    def left(self, record: JobRecord, file: str) -> str:
        """A file of its submission; "" without one. Raises HostError."""
        assert record.slurm  # noqa: S101 - the caller's
        return self.login(self._jobs.cluster(record.cluster)).text_of(record.slurm.folder, file)

    def last_error(self, record: JobRecord) -> str:
        """Raises HostError."""
        assert record.slurm  # noqa: S101 - the caller's
        return self.login(self._jobs.cluster(record.cluster)).last_error(record.slurm.folder)

    def forget(self, record: JobRecord) -> None:
        """Removes its submission and its record. Raises HostError."""
        assert record.slurm  # noqa: S101 - the caller's
        self.login(self._jobs.cluster(record.cluster)).drop(record.slurm.folder)
        self._jobs.forget_job(record.id)

    def recovered(self, cluster: Cluster, known: Collection[str]) -> Iterator[LaunchPlan | JobRecord | OrchError]:
        """Remembers all jobs that are not known, or of which no start is; a record is of a job that has not started.
        Raises HostError.
        """
        unstarted = {job.id for job in self._jobs.jobs() if job.was_queued}
        for folder, lines in self.login(cluster).submissions():
            if (queued := _queued(folder, lines)) and folder not in known and queued.record.cluster == cluster.name:
                yield self._remember_queued(queued)
            for started in _started(lines):
                if started.job in {*known} - unstarted or not started.hosts:
                    continue
                number = next(iter(started.hosts.values())).partition("+")[0]
                try:
                    yield self._remember(cluster, started, SlurmLoan(job=number, folder=folder))
                except OrchError as error:
                    yield error

    def _remember(self, cluster: Cluster, started: Started, loan: SlurmLoan, number: int = 0) -> LaunchPlan:
        """number: 0 keeps a known job's. Raises HostError, or OrchError for a plan that contradicts the inventory."""
        login, node = self._connections.kept(cluster.login), cluster.node(started.master)
        host = ConnectedHost(login.transport, node.python, node.activate, node.workdir)
        known = [job for job in self._jobs.job_ids() if job != started.job]
        recalled = recall({node.name: launch.recall(host, known)}, cluster)
        if started.job not in recalled.plans:
            raise OrchError(*(recalled.left_out[:1] or [f"{started.job} is gone from {node.workdir}"]))
        plan = recalled.plans[started.job]
        hosts = {name: each for name, each in started.hosts.items() if name in {node.name for node in plan.nodes}}
        record = JobRecord.of(plan, "starting").model_copy(update={"number": number})
        self._jobs.save_job(record.model_copy(update={"slurm": loan.model_copy(update={"hosts": hosts})}), plan)
        self.learn(cluster, loan.folder)
        return plan

    def _remember_queued(self, queued: Queued) -> JobRecord | OrchError:
        record = queued.record
        assert record.slurm  # noqa: S101 - of `_queued`
        if queued.owner != read_owner(self._jobs.home):
            words = f"{record.id} of {queued.owner.name} has not started: Slurm's job {record.slurm.job}"
            return OrchError(words, "once it runs, `orch jobs --rescan --adopt` makes it yours")
        self._jobs.save_job(record.model_copy(update={"number": self._jobs.next_number()}))
        return self.refreshed(record)

    def learn(self, cluster: Cluster, folder: str) -> None:
        """Remembers the facts of the hosts that this submission has examined, for plans. Raises HostError."""
        with suppress(ValidationError):
            text = self.login(cluster).text_of(folder, f"home/clusters/{cluster.name}.json")
            own = {node.name for node in cluster.nodes}
            seen = {name: facts for name, facts in Cluster.model_validate_json(text).facts.items() if name in own}
            self._jobs.change_cluster(
                cluster.name, lambda known: known.model_copy(update={"facts": {**known.facts, **seen}})
            )


def _now(record: JobRecord, found: SlurmJob, login: str, why: str) -> JobRecord:
    """why: the batch step's last error, if it has started no job."""
    assert record.slurm  # noqa: S101 - the caller's
    loan = record.slurm.model_copy(
        update={"is_over": found.is_over, "words": found.words if found.phase in ("queued", "held") else ""}
    )
    record = record.model_copy(update={"slurm": loan})
    if not (record.was_queued and found.is_over) or record.state in ENDED:
        return record
    failure = FirstFailure(kind="slurm", node=login, reason=f"nothing of it has run{f': {why}' if why else ''}")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return ended_by(record.model_copy(update={"state": "lost", "first_failure": failure, "ended": now}), found)


def _queued(folder: str, text: str) -> Queued | None:
    """text: of `number` and `queued.json`."""
    number, _, written = text.partition("\n")
    with suppress(ValidationError):
        queued, loan = Queued.model_validate_json(written), SlurmLoan(job=number.partition(";")[0], folder=folder)
        if queued.record.id == folder:
            return queued.model_copy(update={"record": queued.record.model_copy(update={"slurm": loan})})
    return None


def _started(text: str) -> Iterator[Started]:
    for line in text.splitlines():
        with suppress(ValidationError):
            yield Started.model_validate_json(line)


def started_line(job: str, master: str, hosts: dict[str, str]) -> str:
    return json.dumps({"job": job, "master": master, "hosts": hosts}) + "\n"
