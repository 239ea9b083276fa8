"""A started job and its hosts: refresh, follow, diagnose, cancel, collect, pull.

    job = controller.jobs.find("latest")    asks no host
    for event in job.follow(): ...          until it has ended

Most calls reconnect to the hosts, which ends streams over earlier connections; a stream that has to go on uses
`apart()`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path
from typing import Any

from orchestrator.errors import HostError, OrchError, UsageError
from orchestrator.files import own_folder
from orchestrator.hosts.connections import CONNECT_S, Connections
from orchestrator.jobs import collect, launch, pull
from orchestrator.jobs.collect import is_removed, nothing_left, tails
from orchestrator.jobs.diagnosis import diagnose
from orchestrator.jobs.follow import Event, Follow, HostLiveness, watch, watch_records
from orchestrator.jobs.frames import Agent, Held
from orchestrator.jobs.job_store import ENDED, FINAL_STATES, JobRecord, JobStore, Verdict
from orchestrator.jobs.launch import on_all
from orchestrator.jobs.live_stats import Gauge
from orchestrator.jobs.pull import Output, Outputs, outputs
from orchestrator.jobs.slurm_queue import SlurmQueue
from orchestrator.jobs.stall import HostSnapshot, StallProbe, answered, lost_output_words, needs_diagnosis
from orchestrator.jobs.state import combine, ended_by, is_gone, is_half_started, is_weak
from orchestrator.owner import read_owner
from orchestrator.paths import RunFolder
from orchestrator.planning.job_forms import spec_of, write_job
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.record import write_record
from orchestrator.slurm.answers import SlurmJob
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost, understood, words_of
from orchestrator.transport.fanout import errors_by_node, for_each, values
from orchestrator.units import one_line

CANCEL_S = 60.0
"""For the final records, after twice the grace period."""

Records = dict[str, Mapping[str, Any] | HostError]
"""By node: the supervisor's record, or the error."""


@dataclass(frozen=True)
class Fetched:
    record: JobRecord
    new_bytes: int
    errors: Mapping[str, HostError]
    """Hosts whose part is incomplete."""
    notices: Sequence[str]

    @property
    def is_whole(self) -> bool:
        return self.record.state in FINAL_STATES and not self.errors


class RunningJob:
    """hosts: connected ones by node; None before the first connection."""

    def __init__(
        self,
        plan: LaunchPlan,
        jobs: JobStore,
        connections: Connections,
        hosts: Mapping[str, ConnectedHost] | None = None,
    ) -> None:
        self.plan = plan
        self._jobs, self._connections = jobs, connections
        self._hosts = hosts

    @property
    def id(self) -> str:
        return self.plan.job

    @property
    def record(self) -> JobRecord:
        """Raises StateError if it is damaged."""
        return self._jobs.job_record(self.id)

    @property
    def hosts(self) -> Mapping[str, ConnectedHost]:
        """Connects first if necessary."""
        if self._hosts is None:
            self.reach()
        return self._hosts or {}

    def reach(self, only: Sequence[str] = (), without: Collection[str] = ()) -> dict[str, HostError]:
        """Returns the errors of unreachable hosts. only: () means all."""
        cluster = self._jobs.cluster(self.plan.cluster)
        known = {node.name: node for node in cluster.nodes}
        if loan := self.record.slurm if cluster.engine else None:
            held = {name: {"allocation": loan.hosts.get(name)} for name in known.keys() & loan.hosts.keys()}
            known |= {name: known[name].model_copy(update=update) for name, update in held.items()}
        names = [node.name for node in self.plan.nodes if (not only or node.name in only) and node.name not in without]
        connected = self._connections.open([known[name] for name in names if name in known])
        gone = [name for name in names if name not in known]
        again = f"`orch up {cluster.file}` after adding it again"
        removed = {name: HostError(name, f"is no longer in cluster {cluster.name}", again) for name in gone}
        self._hosts = values(connected)
        return {**errors_by_node(connected), **removed}

    @contextmanager
    def apart(self) -> Iterator[RunningJob]:
        """The job over separate connections."""
        hosts, self._hosts = self._hosts or {}, None
        with self._connections.apart(hosts) as own:
            went = own.still_open(hosts)
            yield RunningJob(self.plan, self._jobs, own, went if went and went == hosts else None)

    # ---- how it goes ----------------------------------------------------------------------------------------------

    def follow(
        self,
        *,
        until_end: bool = True,
        last_lines: Mapping[int, int | None] | None = None,
        since_wall: float | None = None,
        times: bool = False,
        folds: bool = False,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Iterator[Event]:
        """Lines that came together are one event. Updates the job's record. until_end: see `Follow`. last_lines: by
        rank, lines of each log (None: all). since_wall: only lines printed since then, by the local clock. times: lines
        carry the time of printing. folds: tracebacks wait for the job's end (`tracebacks`). wanted: asked at least once
        a second; False ends it. Raises OrchError if no host holds anything of the job.
        """
        follow = Follow(self.plan, self._remember, until_end=until_end, ask=self.ask_why, folds=folds)
        reopen = self._connections.reopen
        offsets: dict[str, dict[str, Held]] = {}
        if last_lines is not None:
            offsets = tails(self.plan, self.hosts, last_lines, follow=until_end, since_wall=since_wall)
        with closing(
            watch(self.plan, self.hosts, offsets=offsets, follow=until_end, times=times, reconnect=reopen)
        ) as told:
            yield from follow.events(takewhile(lambda _: wanted(), told))
        if not wanted():
            return
        if is_gone(self.plan, follow.liveness.records) and self.record.state != "starting":
            raise nothing_left(self._jobs, self.plan)
        yield from follow.last_words()

    def gauged(self, gauge: Gauge) -> Iterator[Gauge]:
        """Feeds the gauge until the job has ended; yields it after each frame, at least once a second. Logs are not
        transferred.
        """
        liveness, probe = HostLiveness(silence_s=self.plan.asked.silence_s), StallProbe(self.ask_why)
        for name, error in self.reach().items():
            gauge.take(name, error, time.monotonic())
        reopen = self._connections.reopen
        with closing(
            watch(self.plan, self.hosts, offsets={}, follow=True, files=gauge.FILES, reconnect=reopen)
        ) as told:
            for name, item in told:
                now_s = time.monotonic()
                gauge.take(name, item, now_s)
                if liveness.take(name, item, now_s):
                    gauge.know(record := self._remember(liveness.found(now_s)))
                    probe.tell(record)
                if answer := probe.answer():
                    gauge.know(answer)
                yield gauge
                if gauge.record.state in FINAL_STATES:
                    return

    def snapshots(self) -> dict[str, HostSnapshot | HostError]:
        """By node."""
        away = self.reach()
        found = {**away, **snapshots_of(self.plan, self.hosts)}
        return {node.name: found[node.name] for node in self.plan.nodes}

    def ask_why(self) -> JobRecord:
        """Diagnoses a stall over existing connections; unchanged if no host answers."""
        names = {node.name: node.name for node in self.plan.nodes if node.name in self.hosts}
        connected = for_each(names, self._connections.current, deadline_s=CONNECT_S)
        away = {node.name: HostError(node.name, "was not reached") for node in self.plan.nodes}
        outcomes = {**away, **errors_by_node(connected), **snapshots_of(self.plan, values(connected))}
        if len(errors_by_node(outcomes)) == len(outcomes):
            return self.record
        return self.remember_why(diagnose(self.plan, outcomes))

    def remember_why(self, verdict: Verdict) -> JobRecord:
        return self._jobs.change_job(self.id, lambda known: answered(known, verdict))

    def refresh(self) -> JobRecord:
        """Unchanged if no host answers or the job has ended. Undoes a half-done start."""
        return self.asked_after()[0]

    def asked_after(self, silent: Mapping[str, HostError] | None = None) -> tuple[JobRecord, dict[str, HostError]]:
        """The refreshed record and the hosts without an answer. silent: nodes known not to answer."""
        known, plan = self.record, self.plan
        if known.state in ENDED:
            return known, {}
        launched = not self._jobs.home.launching(self.id).exists()  # before the hosts are asked
        away = {node.name: silent[node.name] for node in plan.nodes if silent and node.name in silent}
        away = {**away, **self.reach(without=away)}
        records: Records = {**away, **launch.agents(plan, self.hosts)}
        if self._jobs.is_half_started(self.id):
            if is_half_started(records):
                records = {**away, **self._end(fence=True)}
            if not errors_by_node(records):
                self._jobs.start_is_over(self.id)
        return self._remember(records, launched=launched), errors_by_node(records)

    def _remember(self, records: Mapping[str, Mapping[str, Any] | HostError], *, launched: bool = False) -> JobRecord:
        now, unsettled = datetime.now(timezone.utc), list[JobRecord]()

        def combined(known: JobRecord, slurm: SlurmJob | None = None) -> JobRecord:
            record = combine(self.plan, records, known, now, launched=launched)
            return ended_by(record, slurm) if slurm else record

        def unless_slurm_decides(known: JobRecord) -> JobRecord:
            record = combined(known)
            if not (record.slurm and known.state not in ENDED and is_weak(record)):
                return record
            unsettled.append(record)
            return known

        record = self._jobs.change_job(self.id, unless_slurm_decides)
        if unsettled:
            try:
                slurm = SlurmQueue(self._jobs, self._connections).settled(record)  # takes too long under the lock
            except HostError:
                return record  # as it was: an end would stay
            if slurm.phase != "ending":
                return self._jobs.change_job(self.id, lambda known: combined(known, slurm))
        return record

    # ---- its end --------------------------------------------------------------------------------------------------

    def cancel(self) -> tuple[JobRecord, list[str]]:
        """Ends the job and waits for it. Returns the record and, by host, what is left or cannot be checked. Raises
        UsageError for another owner's job.
        """
        if self.plan.owner and self.plan.owner != read_owner(self._jobs.home):
            raise UsageError(
                f"{self.id} belongs to {self.plan.owner.name}",
                "only they can end it; if that was you, `orch jobs --rescan --adopt` makes it yours",
            )
        away = self.reach()
        starts = self._jobs.home.launching(self.id).exists()  # half done, or another command is at it
        records = {**away, **self._end(fence=starts)}
        if starts and not errors_by_node(records):
            self._jobs.start_is_over(self.id)
        if self.record.slurm and not self.record.slurm.is_over and not self.successor():
            with suppress(HostError):  # its hosts have ended it: the batch step is about to end by itself
                SlurmQueue(self._jobs, self._connections).cancel(self.record)
        return self._remember(records), [line for name in records for line in _stayed(name, records[name])]

    def successor(self) -> JobRecord | None:
        """The newest job of the same Slurm job, if that is another one: a retry, or a resume."""
        if not self.record.slurm:
            return None
        queue = SlurmQueue(self._jobs, self._connections)
        with suppress(OrchError):  # then of the jobs that are known here
            queue.refreshed(self.record)
        newest = queue.newest(self.record)
        return newest if newest.id != self.id else None

    def _end(self, *, fence: bool) -> Records:
        plan, hosts = self.plan, self.hosts
        records: Records = {**errors_by_node(launch.cancel(plan, hosts, fence=fence))}
        deadline = time.monotonic() + 2 * plan.grace_s + CANCEL_S
        for name, item in watch_records(plan, hosts):
            if isinstance(item, HostError):
                records[name] = item
            elif isinstance(item, Agent):
                records[name] = item.record
            if time.monotonic() > deadline:
                break
        return records

    def removed(self, records: Mapping[str, Mapping[str, Any]], when: str) -> None:
        """records: the last of each host from which `orch down` removed the job."""
        self._jobs.files_removed(self.id, when, list(records))
        self._remember(records)

    # ---- its files ------------------------------------------------------------------------------------------------

    def refuse_if_removed(self) -> None:
        """Raises OrchError after `orch down` on all its hosts."""
        if is_removed(self._jobs, self.plan):
            raise nothing_left(self._jobs, self.plan)

    def collect(
        self,
        run: RunFolder,
        progress: Callable[[str, int], None] = lambda *_: None,
        *,
        limit_bytes: int = collect.MAX_LOG_BYTES,
    ) -> Fetched:
        """run: `claimed`. limit_bytes: per log. Raises OrchError if no host holds anything of the job."""
        away = self.reach()
        collected = collect.collect(self.plan, self.hosts, run, progress, limit_bytes=limit_bytes)
        record = self._remember(collected.agents)
        if needs_diagnosis(record):
            record = self.ask_why()
        if record.state != "starting" and is_gone(self.plan, collected.agents):
            raise nothing_left(self._jobs, self.plan)
        self._jobs.remember_run(self.id, run.root)
        write_record(run.plan, self.plan)
        write_record(run.job, record)
        if not run.job_file.exists():  # the user may have changed it
            with suppress(ValueError, UsageError):  # a plan that came from a host may not fit into a job file
                write_job(run.job_file, spec_of(self.plan))
        notices = (*collected.notices, *lost_output_words(self.plan, collected.agents))
        return Fetched(record, collected.new_bytes, {**away, **collected.errors}, notices)

    def outputs(self, only: Sequence[str] = ()) -> Outputs:
        """only: nodes; () means all. Raises OrchError if no host holds anything of the job."""
        self.refuse_if_removed()
        away = self._reach_own(only)
        listed = outputs(self.plan, self.hosts)
        if len(listed.found) == len(self.plan.nodes) and all(listing.gone for listing in listed.found.values()):
            raise nothing_left(self._jobs, self.plan)
        return Outputs(listed.found, {**away, **listed.errors})

    def pull(
        self,
        wanted: Mapping[str, Sequence[Output]],
        out: Path,
        show: Callable[[pull.PullProgress], None] = lambda _: None,
    ) -> dict[str, pull.Pulled | HostError]:
        """Into `out/<job>/`. Raises HeldError during another pull."""
        run = RunFolder(out / self.id)
        own_folder(run.root)
        with collect.alone(run.pull_lock, f"is pulling into {run.root}", "pull again when it is done"):
            self._jobs.remember_run(self.id, run.root)
            away = self._reach_own(list(wanted))
            pulled = pull.pull(self.plan, self.hosts, run, wanted, show, self._reopened)
        return {**pulled, **away}

    def _reach_own(self, only: Sequence[str]) -> dict[str, HostError]:
        """`reach`, with the job's own work folders."""
        known = [node.name for node in self.plan.nodes]
        for name in only:
            if name not in known:
                raise UsageError(f"{name}: no node of {self.id}", f"its nodes: {', '.join(known)}")
        away = self.reach(only)
        self._hosts = {name: self._in_its_folder(host) for name, host in self.hosts.items()}
        return away

    def _reopened(self, name: str) -> ConnectedHost:
        return self._in_its_folder(self._connections.reopen(name))

    def _in_its_folder(self, host: ConnectedHost) -> ConnectedHost:
        return replace(host, workdir=self.plan.node(host.node).workdir)


def _stayed(name: str, record: Mapping[str, Any] | HostError) -> list[str]:
    """The parts of the job that may still run on this host."""
    if isinstance(record, HostError):
        return [str(record)]
    if record.get("alive"):
        return [f"{name}: its supervisor still runs (state {one_line(record.get('state'), 20)})"]
    return [f"{name}: {process}" for process in understood(name, lambda: words_of(record.get("leftovers", [])))]


# Snapshots of a job's ranks, from all its hosts at once.

ASK_S = 40.0
"""A host takes about two seconds, longer if processes answer slowly."""


def snapshots_of(plan: LaunchPlan, hosts: Mapping[str, ConnectedHost]) -> dict[str, HostSnapshot | HostError]:
    def look(name: str) -> HostSnapshot:
        node = plan.node(name)
        request = {"workdir": node.workdir, "job": plan.job}
        answer = ask.ask(hosts[name], "why", request, timeout_s=ASK_S)
        found = ask.understood(name, lambda: HostSnapshot.model_validate(answer))
        own = tuple(rank for rank in found.ranks if rank.rank in node.rank_numbers)
        return found.model_copy(update={"ranks": own})

    return on_all(plan, look, ASK_S, only=hosts)
