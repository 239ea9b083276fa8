"""The stages of a job, from a spec to its report: request, plan, GPU check, launch, then collect, analyse, report.
Prints nothing.

Parts are imported on first use. `clusters` builds clusters, `jobs/job_list` lists and recovers jobs, `jobs/running` is
one job; `measuring/` runs jobs of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import HostError, HostsError, OrchError, RefusedError, UsageError
from orchestrator.files import own_folder
from orchestrator.hosts.connections import Connections
from orchestrator.owner import read_owner
from orchestrator.paths import Home, RunFolder
from orchestrator.store import Store
from orchestrator.transport.fanout import errors, values

if TYPE_CHECKING:
    from orchestrator.clusters import Clusters, Up
    from orchestrator.doctor.start import StartChecks
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.hosts.inventory import Inventory, Node
    from orchestrator.hosts.work_folders import Cleared
    from orchestrator.jobs.collect import HeldError
    from orchestrator.jobs.job_list import JobList, JobRecovery
    from orchestrator.jobs.job_queue import Queue
    from orchestrator.jobs.launch import Prepared
    from orchestrator.jobs.running import RunningJob
    from orchestrator.planning.job_spec import JobSpec
    from orchestrator.planning.launch_plan import LaunchPlan
    from orchestrator.provision.venvs import SetupProgress
    from orchestrator.results.network import LinksCarried
    from orchestrator.results.summary import Summary
    from orchestrator.starting.carry_over import Handovers
    from orchestrator.starting.planner import HostChooser, Planner
    from orchestrator.starting.retries import Asked, Retries
    from orchestrator.starting.submission import Submissions
    from orchestrator.transport.ask import ConnectedHost

CROSSED_PAUSES_S = (1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Report:
    summary: Summary
    run: RunFolder
    new_bytes: int
    errors: Mapping[str, HostError]
    """Hosts whose part could not be fetched."""
    notices: Sequence[str] = ()


@contextmanager
def opened(
    home: Home,
    *,
    accept_new_host_keys: bool = False,
    ask_passphrase: Callable[[str], str | None] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Controller]:
    """Its connections end with the block."""
    with Connections(
        home, accept_new_host_keys=accept_new_host_keys, ask_passphrase=ask_passphrase, say=say
    ) as connections:
        yield Controller(Store(home), connections, say)


class Controller:
    """say: prints a line before a job starts."""

    def __init__(self, store: Store, connections: Connections, say: Callable[[str], None] = lambda line: None) -> None:
        self.store, self.connections, self.say = store, connections, say
        self.shows_setup: Callable[[SetupProgress], None] = lambda progress: None
        """Called from several threads while hosts install a job's packages."""

    @cached_property
    def clusters(self) -> Clusters:
        from orchestrator.clusters import Clusters

        return Clusters(self.store, self.connections)

    @cached_property
    def planner(self) -> Planner:
        from orchestrator.starting.planner import Planner

        return Planner(self.store, self.clusters)

    @cached_property
    def choice(self) -> HostChooser:
        from orchestrator.starting.planner import HostChooser

        return HostChooser(self.planner, self.clusters)

    @cached_property
    def queue(self) -> Queue:
        from orchestrator.jobs.job_queue import Queue

        return Queue(self.store, self.connections)

    @cached_property
    def handovers(self) -> Handovers:
        from orchestrator.starting.carry_over import Handovers

        return Handovers(self.store, self.connections)

    @cached_property
    def checks(self) -> StartChecks:
        from orchestrator.doctor.start import StartChecks

        return StartChecks(self.store, lambda line: self.say(line))

    @cached_property
    def jobs(self) -> JobList:
        from orchestrator.jobs.job_list import JobList

        return JobList(self.store, self.connections)

    @cached_property
    def lost_jobs(self) -> JobRecovery:
        from orchestrator.jobs.job_list import JobRecovery

        return JobRecovery(self.store, self.connections)

    @cached_property
    def submissions(self) -> Submissions:
        from orchestrator.starting.submission import Submissions

        shows = lambda progress: self.shows_setup(progress)  # noqa: E731 - the command may set it later
        return Submissions(self.store, self.connections, self.jobs, lambda line: self.say(line), shows)

    # ---- running ----------------------------------------------------------------------------------------------

    def up(self, inventory: Inventory) -> Up:
        """Raises OrchError."""
        up = self.clusters.up(inventory)
        if not up.cluster.engine:
            return up
        return replace(up, warnings=(*up.warnings, *self.submissions.prepare(up.cluster)))

    def read(self, spec: JobSpec) -> Asked:
        """Raises OrchError."""
        from orchestrator.planning.request import parse_job
        from orchestrator.starting.retries import Asked

        if spec.resume:
            return self._resumed(spec, spec.resume)
        job, cluster = parse_job(spec), self.store.cluster(spec.cluster)
        return Asked(cluster, job, () if cluster.engine else cluster.names(spec.nodes))

    def _resumed(self, spec: JobSpec, wanted: str) -> Asked:
        """Resumes from a job's last checkpoint; the host that has it becomes the master. A script that resumes by
        itself gets all its files. Raises UsageError, HostsError.
        """
        from orchestrator.jobs.retry_policy import job_from, keepers_of, last_checkpoint, settings_of
        from orchestrator.planning.request import parse_job
        from orchestrator.starting.retries import Asked

        old = self.jobs.find(wanted, spec.cluster).plan
        exp, kept = settings_of(old, spec)
        cluster = self.store.cluster(old.cluster)
        only = [] if cluster.engine else cluster.names(spec.nodes)
        keepers = [cluster.node(name) for name in keepers_of(old)]
        if self._saved_its_own(old, keepers):
            job = parse_job(spec)
            return Asked(cluster, replace(job, request=replace(job.request, resumes=old.job)), only)
        there = [node for node in keepers if node.name not in cluster.released and (not only or node.name in only)]
        if not there:
            names = [node.name for node in keepers]
            raise UsageError(
                f"the checkpoints of {old.job} are on {' and '.join(names)}, which takes no part",
                f"`orch node restore {names[0]}`, or name it in --nodes",
            )
        opened = self.connections.open(there)
        if not values(opened):
            raise HostsError(errors(opened))
        found = last_checkpoint(old, values(opened))
        pinned = cluster.model_copy(update={"master_pin": found.node})
        return Asked(pinned, job_from(exp, kept, found.path, spec), only)

    def _saved_its_own(self, old: LaunchPlan, keepers: Sequence[Node]) -> bool:
        """Whether its script saved its own checkpoints. `trainer` in its folder may belong to another script: then we
        wrote no checkpoint.
        """
        from orchestrator.jobs.retry_policy import kept_by

        if old.kind == "experiment" or old.recorded.checkpoint_every or old.recorded.resume:
            return False
        there = values(self.connections.open(keepers)) if old.training else {}
        return not old.training or (bool(there) and not any(kept_by(old, host) for host in there.values()))

    def plan(self, asked: Asked) -> LaunchPlan:
        """The plan that `start` would launch."""
        job = asked.job
        return self.handovers.noted(self.choice.plan(asked.cluster, job.request, job.code, asked.only), job.blob)

    def start(self, asked: Asked, shown: Callable[[LaunchPlan], None] = lambda _: None) -> RunningJob:
        """Plans and launches a job; with `waits`, its hosts start it in its turn. With `request.hosts`, hosts that
        refuse are replaced by spares while enough remain. On Slurm, returns when it has started the job. shown: called
        with each plan before it is tried. Raises OrchError.
        """
        if asked.cluster.engine:
            return self.submissions.started(self.submissions.submit(asked), self.say)
        cluster, request, code = asked.cluster, asked.request, asked.job.code
        if request.hosts is None or request.spec.waits:
            shown(plan := self.choice.plan(cluster, request, code, asked.only))
            return self._launch_before_rivals(plan, asked.job.blob)
        away, notes = self.choice.away(cluster, request, asked.only), set[str]()
        while True:
            shown(plan := self.choice.plan_on_present(cluster, request, code, asked.only, away))
            try:
                return self.launch(plan, asked.job.blob, notes)
            except RefusedError as error:
                away |= {each.node: each for each in error.errors}
            if plan.job in self.store.job_ids() and self.store.job_record(plan.job).state == "cancelled":
                self.store.forget_job(plan.job)

    def retries(self, asked: Asked, start: Callable[[Asked], RunningJob]) -> Retries:
        """start: `start`, with its output for the user."""
        from orchestrator.starting.retries import Retries

        return Retries(self.clusters, self.connections, start, self.say, asked)

    def launch(self, plan: LaunchPlan, blob: bytes, shown: set[str] | None = None) -> RunningJob:
        """Starts the job on all its hosts or on none. Raises HostsError; RefusedError means that no host was asked to
        run it. shown: lines already printed for this start.
        """
        from orchestrator.clusters import now_utc
        from orchestrator.doctor.start import needed_bytes
        from orchestrator.jobs.job_store import JobRecord
        from orchestrator.jobs.launch import launch

        plan = plan.model_copy(update={"owner": read_owner(self.store.home)})
        handover = self.handovers.find(plan, blob)
        plan = plan.model_copy(update={"notes": (*plan.notes, *handover.notes)})
        record = JobRecord.of(plan, "starting")
        job = self._reached(plan)
        plan, hosts = self._with_packages(plan, job.hosts)
        shown = set() if shown is None else shown
        for note in dict.fromkeys(note for note in handover.notes if note not in shown):
            self.say(note)
        shown |= {*handover.notes}
        has_room = self.checks.look_at_gpus(plan, job.hosts, shown)
        with self.store.launching(record, plan) as start:
            is_cancelled = False

            def undone() -> None:
                nonlocal is_cancelled
                is_cancelled = job.record.state == "cancelled"  # by another command
                self.store.save_job(record.model_copy(update={"state": "cancelled", "ended": now_utc()}))
                self.store.nothing_to_collect(record.id)
                start.over()

            def prepared(answers: Mapping[str, Prepared]) -> None:
                self.checks.check_prepared(plan, job.hosts, answers, shown)

            needed = {node.name: needed_bytes(plan, node) for node in plan.nodes if plan.asked.waits}
            carried = partial(self.handovers.deliver, plan, handover)
            try:
                at_once = launch(plan, hosts, blob, undone, prepared, carried, needed, has_room=has_room)
            except HostsError as error:
                if is_cancelled:
                    raise OrchError(f"{job.id} was cancelled while it started", "`orch run` starts it again") from error
                raise
            start.over()
            if plan.asked.waits and not at_once:
                self.store.change_job(
                    job.id,
                    lambda known: known.model_copy(update={"state": "queued"} if known.state == "starting" else {}),
                )
        return job

    def _with_packages(
        self, plan: LaunchPlan, hosts: Mapping[str, ConnectedHost]
    ) -> tuple[LaunchPlan, Mapping[str, ConnectedHost]]:
        """With each host's Python that has the job's packages. Raises RefusedError."""
        from orchestrator.provision.venvs import set_up_for_job

        if plan.requirements is None:
            return plan, hosts
        envs, owner = {node.name: node.env for node in plan.nodes}, read_owner(self.store.home)
        made = set_up_for_job(hosts, plan.requirements, envs, self.shows_setup, owner=owner, cluster=plan.cluster)
        if failed := errors(made):
            raise RefusedError(failed)
        pythons = {name: each.python for name, each in values(made).items()}
        nodes = tuple(node.model_copy(update={"python": pythons[node.name]}) for node in plan.nodes)
        own = {name: replace(host, python=pythons[name]) for name, host in hosts.items()}
        return plan.model_copy(update={"nodes": nodes}), own

    def _launch_before_rivals(self, plan: LaunchPlan, blob: bytes) -> RunningJob:
        """`launch`; simultaneous starts that block each other try again at random moments, so that one goes first."""
        shown = set[str]()
        for pause_s in CROSSED_PAUSES_S:
            try:
                return self.launch(plan, blob, shown)
            except RefusedError as error:
                if not self.queue.is_crossed(plan, error):
                    raise
            time.sleep(random.uniform(0, pause_s))  # noqa: S311 - no secret
        return self.launch(plan, blob, shown)

    def _reached(self, plan: LaunchPlan) -> RunningJob:
        """Connects to all hosts, after half-done starts are undone. Raises RefusedError."""
        from orchestrator.clusters import or_without

        self.jobs.settle_half_starts()
        job = self.jobs.of(plan)
        if away := job.reach():
            others = len(away) < len(plan.nodes) and not plan.hosts
            raise RefusedError([or_without(error) if others else error for error in away.values()])
        return job

    # ---- cleaning up ------------------------------------------------------------------------------------------

    def down(self, cluster: Cluster, spared: Mapping[str, HostError] | None = None) -> dict[str, Cleared | HostError]:
        """Ends this cluster's jobs, removes our files from its hosts, and records both. spared: see `Clusters.down`."""
        from orchestrator.clusters import now_utc

        if cluster.engine:
            self.submissions.end_all(cluster)
        answers = self.clusters.down(cluster, spared)
        if cluster.engine and not errors(answers):
            self.submissions.remove_all(cluster)
        cleared, now = values(answers), now_utc()
        for wanted in {job_id for answer in cleared.values() for job_id in answer.jobs} & {*self.store.job_ids()}:
            with suppress(OrchError):  # a damaged plan
                plan = self.store.plan(wanted)
                removed = {node.name: cleared[node.name].jobs for node in plan.nodes if node.name in cleared}
                if last := {name: jobs[wanted] for name, jobs in removed.items() if wanted in jobs}:
                    self.jobs.of(plan).removed(last, now)
        if not errors(answers):
            held = {there.job for answer in cleared.values() for there in answer.left}
            for wanted in self.store.uncollected(cluster.name):
                if wanted not in held:
                    self.store.nothing_to_collect(wanted)
        return answers

    # ---- results ----------------------------------------------------------------------------------------------

    def collect(
        self,
        job: RunningJob,
        out: Path,
        progress: Callable[[str, int], None] = lambda *_: None,
        *,
        limit_bytes: int | None = None,
    ) -> Report:
        """Copies new data into `out/<job>/`, analyses it, writes the report. During another collect, returns the
        existing report. Raises HeldError without a report.

        limit_bytes: per log; None: MAX_LOG_BYTES.
        """
        from orchestrator.jobs.collect import MAX_LOG_BYTES, HeldError, claimed

        job.refuse_if_removed()
        limit_bytes = MAX_LOG_BYTES if limit_bytes is None else limit_bytes
        run = RunFolder(out / job.id)
        own_folder(run.root)
        try:
            with claimed(run):
                fetched = job.collect(run, progress, limit_bytes=limit_bytes)
                summary = self._analysed(run)
            if fetched.is_whole:
                self.store.nothing_to_collect(job.id)
            return Report(summary, run, fetched.new_bytes, fetched.errors, fetched.notices)
        except HeldError as error:
            return _found_before(run, error)

    def report(self, run: RunFolder) -> Report:
        """Analyses a collected run folder and writes its report, without hosts. Raises HeldError like `collect`."""
        from orchestrator.jobs.collect import HeldError, claimed

        try:
            with claimed(run):
                return Report(self._analysed(run), run, 0, {})
        except HeldError as error:
            return _found_before(run, error)

    def _analysed(self, run: RunFolder) -> Summary:
        """The folder has to be `claimed`."""
        from orchestrator.results.analyse import analyse
        from orchestrator.views.report import write_report

        summary = analyse(run)
        write_report(run, summary, self._links_of(run, summary))
        return summary

    def _links_of(self, run: RunFolder, summary: Summary) -> LinksCarried | None:
        """The newest measurement of this run's network."""
        from orchestrator.forecast.links import COLLECTIVES, runs_measuring
        from orchestrator.results.network import links_carried

        names = [node.name for node in summary.nodes]
        if len(names) < 2 or summary.collectives:
            return None
        measuring = runs_measuring(run.root.parent, summary.cluster, names, self.store.runs_of(COLLECTIVES))
        carried = (links_carried(one.job, one.collectives, names) for one in measuring if one.collectives)
        return next(filter(None, carried), None)


def _found_before(run: RunFolder, held: HeldError) -> Report:
    """The existing report. Raises `held` without a report."""
    if not run.summary.is_file():
        raise held
    from orchestrator.results.summary import Summary

    notice = f"{held.message}; this is the last collect's report. {held.remedy}"
    return Report(Summary.load(run), run, 0, {}, (notice,))
