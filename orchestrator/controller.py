"""The only file that knows the order of the stages. Takes wishes, gives values; prints nothing.

inventory → connect → probe → checks → election → (cluster remembered)          up
request → plan → launch → follow                                                run
plan → collect → analyse → report                                               collect
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from orchestrator.clusters import Clusters, now_utc
from orchestrator.errors import ConnectError, HostError, HostsError, OrchError, StateError, UsageError
from orchestrator.files import own_folder
from orchestrator.forecast.faster import predicted, without_slow
from orchestrator.forecast.inputs import COLLECTIVES, View, foreseen, look, memory_notes, read_network, with_best_way
from orchestrator.forecast.memory import needed_bytes
from orchestrator.forecast.rounds import with_rounds
from orchestrator.hosts import occupied
from orchestrator.hosts.belongings import Cleared
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.probe import probe
from orchestrator.jobs import collect, control, pull, rescan
from orchestrator.jobs.copies import is_removed, nothing_left
from orchestrator.jobs.faults import fault_words
from orchestrator.jobs.frames import Agent, Beat, Piece
from orchestrator.jobs.heard import Heard
from orchestrator.jobs.launch import launch
from orchestrator.jobs.lines import Bars, Line, Splitter
from orchestrator.jobs.live import LiveView, Notice, Progress, Silence
from orchestrator.jobs.pull import Listing, Output, Pulled, list_outputs
from orchestrator.jobs.record import ENDED, FINAL_STATES, JobRecord
from orchestrator.jobs.resume import last_checkpoint, settings_of
from orchestrator.jobs.stall import News
from orchestrator.jobs.state import combine, is_half_started
from orchestrator.jobs.watch import watch, watch_records
from orchestrator.owner import read_owner
from orchestrator.paths import RUNS, RunFolder
from orchestrator.planning.build import build_plan
from orchestrator.planning.draft import Draft
from orchestrator.planning.homes import homes_of, notes_on
from orchestrator.planning.launch_plan import CodeFolder, Faster, LaunchPlan, NodePlan
from orchestrator.planning.nccl import choose_carrier
from orchestrator.planning.placement import place
from orchestrator.planning.profiles import Profiles, kinds_of
from orchestrator.planning.request import RunRequest, Wish, parse_pairs, read_experiment
from orchestrator.planning.split import split_batch_of, split_equally
from orchestrator.record import Owner, write_record
from orchestrator.results.summary import Summary
from orchestrator.store import Store
from orchestrator.text import one_line
from orchestrator.transport.ask import Host, understood, words_of
from orchestrator.transport.fanout import errors, errors_by_node, for_each, values
from orchestrator.units import counted

LATE_S = 10.0
"""After the job's last word, so long do we wait for hosts that have not ended their stream."""
CANCEL_S = 60.0
GPUS_S = 60.0
"""For a look at who is on them: twice what nvidia-smi may take."""
PROGRESS_S = 0.25
"""Between two values of a run's progress."""
BARS_S = 1.0
"""Between two states of lines that ranks draw over and over; and between two words about a silence."""
_ID_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"


@dataclass(frozen=True)
class Jobs:
    """records: newest first. problems: by job, cluster or host, what could not be read or asked.

    unheard: by job that may still run, its hosts that gave no answer. Its record is what the others say, or what was
    known before.
    """

    records: tuple[JobRecord, ...]
    problems: Mapping[str, OrchError]
    unheard: Mapping[str, Mapping[str, HostError]] = field(default_factory=dict)
    notices: Sequence[str] = ()


@dataclass(frozen=True)
class Unpulled:
    """By job, what would be lost with its files on its hosts: (node, file). errors: hosts that could not be asked."""

    files: Mapping[str, Sequence[tuple[str, Output]]]
    errors: Mapping[str, HostError]


@dataclass(frozen=True)
class Outputs:
    """By node, what a job wrote beside its logs; and the hosts that could not be asked."""

    found: Mapping[str, Listing]
    errors: Mapping[str, HostError]


@dataclass(frozen=True)
class Report:
    """summary and the files it came from. errors: hosts whose part could not be fetched. notices: what else there is
    to know of the files.
    """

    summary: Summary
    run: RunFolder
    new_bytes: int
    errors: Mapping[str, HostError]
    notices: Sequence[str] = ()


class Controller:
    """tell: is given what a person should know before a job starts, a line each."""

    def __init__(self, store: Store, connections: Connections, tell: Callable[[str], None] = lambda line: None) -> None:
        self.store, self.connections, self.tell = store, connections, tell
        self.clusters = Clusters(store, connections)

    # ---- running ----------------------------------------------------------------------------------------------

    def plan(self, cluster: Cluster, request: RunRequest, code: CodeFolder, only: Sequence[str] = ()) -> LaunchPlan:
        """only: the nodes to take; none means all that are not released. Raises HostsError for unusable ones."""
        plan, better = self._foreseen(cluster, request, code, only)
        notes: tuple[str, ...] = ()
        while better and not only and request.leaves_out:
            notes += (_left_out_words(plan, better, request),)
            plan, better = self._foreseen(cluster, request, code, better.hosts)
        return plan.model_copy(update={"notes": (*plan.notes, *notes)})

    def _foreseen(
        self, cluster: Cluster, request: RunRequest, code: CodeFolder, only: Sequence[str]
    ) -> tuple[LaunchPlan, Faster | None]:
        """With these nodes, and whether fewer of them would be faster."""
        draft, profiles, not_kept = self._drawn(cluster, request, code, only)
        ranks = draft.placement.ranks
        if draft.training:
            split = split_batch_of(draft.training, ranks, profiles, not_kept)
        else:
            split = split_equally(request.batch, ranks)
        return _with_outlook(draft.with_split(split), profiles, self.store.runs_of(COLLECTIVES))

    def outlook(
        self,
        cluster: Cluster,
        request: RunRequest,
        code: CodeFolder,
        only: Sequence[str] = (),
        *,
        out: Path | None = None,
        bandwidth_bps: float | None = None,
    ) -> tuple[LaunchPlan, View]:
        """What would run, and what is known of its speed. out: a folder of collected runs; None means the usual one,
        and all others that are remembered. Raises UsageError where too little is known, HostsError for hosts that
        cannot take part.
        """
        draft, profiles, _ = self._drawn(cluster, request, code, only)
        if draft.training:
            ranks = draft.placement.ranks
            try:
                split = split_batch_of(draft.training, ranks, profiles)
            except UsageError:  # by speeds that nobody has measured
                split = split_equally(draft.training.batch, ranks)
            draft = draft.with_split(split)
        plan = build_plan(draft)
        network = read_network(out, plan) if out else read_network(RUNS, plan, self.store.runs_of(COLLECTIVES))
        view = look(plan, profiles, network, bandwidth_bps)
        return build_plan(with_rounds(draft, view)), view

    def _drawn(
        self, cluster: Cluster, request: RunRequest, code: CodeFolder, only: Sequence[str]
    ) -> tuple[Draft, Profiles, Profiles]:
        """Who does what, what is known of the ranks' speeds, and profiles that count for nothing."""
        ready = self.clusters.ready(cluster, only)
        homes = homes_of(ready.nodes, ready.facts)
        request = replace(request, notes=(*notes_on(request, str(Path.home()), homes), *request.notes))
        placement = place(ready.nodes, ready.facts, ready.election, request)
        draft = Draft(
            cluster=cluster.name,
            job=_job_id(request.name),
            created=now_utc(),
            code=code,
            request=request,
            placement=placement,
            carrier=choose_carrier(placement.nodes, request),
        )
        kinds = kinds_of(build_plan(draft), ready.facts)
        not_kept = self.store.profiles(kinds, cluster.name, valid=False)
        return draft, self.store.profiles(kinds, cluster.name), not_kept

    def resume(
        self, wanted: str, settings: Sequence[str], only: Sequence[str] = (), *, named: str | None = None
    ) -> tuple[Cluster, Wish]:
        """To go on from a job's last checkpoint: its cluster with the host that holds it as the master, and what to run
        there. settings: KEY=VALUE that shall differ. named: the cluster that the person named. Raises UsageError or
        HostsError where it cannot be had.
        """
        _, old = self.job(wanted, named)
        exp, kept = settings_of(old)
        cluster = self.store.cluster(old.cluster)
        holder = cluster.node(old.master)
        if holder.name in cluster.released or (only and holder.name not in only):
            raise UsageError(
                f"{holder.name} holds the checkpoint of {old.job}, and takes no part",
                f"`orch node restore {holder.name}`, or name it in --nodes",
            )
        found = self.connections.open([holder])
        if errors(found):
            raise HostsError(errors(found))
        path = last_checkpoint(old, values(found)[holder.name])
        pairs = {**parse_pairs(settings, "--set KEY=VALUE"), "resume": path}
        pinned = cluster.model_copy(update={"master_pin": holder.name})
        return pinned, read_experiment(exp, pairs, kept)

    def launch(self, plan: LaunchPlan, blob: bytes) -> dict[str, Host]:
        """Starts the job on all its hosts or on none; remembers it first. Raises HostsError."""
        plan = plan.model_copy(update={"owner": read_owner(self.store.home)})
        cluster = self.store.cluster(plan.cluster)
        record = JobRecord(
            schema=1,
            id=plan.job,
            state="starting",
            exp=plan.exp,
            cluster=plan.cluster,
            nodes=tuple(node.name for node in plan.nodes),
            started=plan.created,
        )
        self._settle_half_starts()
        hosts = self._reach(cluster, plan)
        self._look_at_gpus(plan, hosts)
        with self.store.launching(record, plan) as start:

            def undone() -> None:
                self.store.save_job(record.model_copy(update={"state": "cancelled", "ended": now_utc()}))
                self.store.nothing_to_collect(record.id)
                start.over()

            launch(plan, hosts, blob, undone)
            start.over()
        return hosts

    def _settle_half_starts(self) -> None:
        """What a controller that died left half started holds GPUs, and nobody will ever tell it to go."""
        for half in self.store.half_started():
            if half not in self.store.job_ids():  # it died before it had asked any host
                self.store.start_is_over(half)
            with suppress(OrchError):  # a damaged record, a host that is away: the next command tries again
                self.refresh(self.store.job_record(half))

    def _reach(self, cluster: Cluster, plan: LaunchPlan) -> dict[str, Host]:
        found = self.connections.open([cluster.node(node.name) for node in plan.nodes])
        if errors(found):
            raise HostsError(errors(found))
        return values(found)

    def _look_at_gpus(self, plan: LaunchPlan, hosts: Mapping[str, Host]) -> None:
        """Tells who is on the job's GPUs at this moment. Raises HostsError where that leaves no room for it."""
        on_gpus = {node.name: node for node in plan.nodes if node.gpu_uuids}

        def look(node: NodePlan) -> NodeFacts:
            return probe(hosts[node.name], (), torch=False, timeout_s=GPUS_S)

        refused = []
        for name, found in for_each(on_gpus, look, deadline_s=GPUS_S).items():
            node = on_gpus[name]
            seen = occupied.judge(name, found, node.gpu_uuids, needed_bytes(plan, node), share=plan.share_gpus)
            for line in seen.lines:
                self.tell(line)
            refused += [seen.refusal] if seen.refusal else []
        if refused:
            raise HostsError(refused)

    def follow(
        self, plan: LaunchPlan, hosts: Mapping[str, Host], *, until_end: bool = True
    ) -> Iterator[tuple[Line, ...] | Notice | Progress | Bars | Silence]:
        """Every line of every rank from the first on, those together that came together; keeps the job's record up to
        date. Raises OrchError where no host holds anything of the job any more.

        until_end: until the job has ended, with its progress a few times a second, and with what ranks draw over and
        over once a second; else only what is there now.
        """
        splitter, heard, broken = Splitter(), Heard(), set[str]()
        refused: list[HostError] = []
        # Hosts tell in their own time: a later fault may come to stand first.
        told = set[tuple[str, int | None, int | None]]()
        view, has_news, progress_due = LiveView(plan), False, 0.0
        is_silent, bars_due = until_end, time.monotonic() + BARS_S
        news = News(plan)
        ended_at: float | None = None
        for name, item in watch(plan, hosts, offsets={}, follow=until_end, reconnect=self.connections.reopen):
            has_word = heard.take(name, item, now_s := time.monotonic())
            if isinstance(item, HostError) and not (until_end and isinstance(item, ConnectError)):
                refused.append(item)  # its key changed, say: what it prints is not shown any more
                yield Notice(f"{item}; the job does not depend on this link and keeps running")
            elif isinstance(item, HostError):
                if name not in broken:
                    yield Notice(f"{item}; the job does not depend on this link, trying again")
                broken.add(name)
            elif name in broken and item != Beat():  # its program spoke, not our own clock
                broken.discard(name)
                yield Notice(f"{name}: connected again")
            if isinstance(item, Piece):
                if item.anew:
                    yield Notice(f"{name}: {item.file} was cut, replaced or rotated on its host; it starts again here")
                if lines := tuple(splitter.split(name, item)):
                    is_silent = False
                    yield lines
                has_news |= until_end and view.take(name, item)
                ended_at = ended_at and time.monotonic()  # who still has something to show is not late
            if has_word:
                record = self._remember(plan, heard.found(now_s))
                for fault in record.faults:
                    key = (fault.node, fault.rank, fault.restart)
                    if key in told:
                        continue
                    told.add(key)
                    yield Notice(fault_words(fault))
                    if fault.rank is None:
                        view.lose(fault.node)
                for words in news.of(record) if until_end else ():
                    yield Notice(words)
                is_over = record.state in FINAL_STATES
                if is_over and ended_at is None and (missed := heard.missed(now_s)):
                    yield Notice(f"{', '.join(sorted(missed))}: no word any more; what the other hosts know counts")
                ended_at = (ended_at or time.monotonic()) if is_over else None
            if has_news and time.monotonic() > progress_due:
                has_news, progress_due = False, time.monotonic() + PROGRESS_S
                is_silent = False
                yield view.progress(_since_s(plan))
            if until_end and time.monotonic() > bars_due:
                bars_due = time.monotonic() + BARS_S
                if lines := tuple(splitter.settle()):
                    yield lines
                if bars := splitter.bars():
                    is_silent = False
                    yield bars
                if is_silent and ended_at is None:
                    yield Silence(plan.world_size, _since_s(plan))
            if ended_at is not None and time.monotonic() > ended_at + LATE_S:
                break
        if lines := tuple(splitter.rest()):
            yield lines
        if _is_gone(plan, heard.records) and self.store.job_record(plan.job).state != "starting":
            raise nothing_left(self.store, plan)
        yield from _dropped(plan, heard.records)
        for error in refused if until_end and ended_at is not None else ():
            yield Notice(f"{error.message}; not all that this host printed is shown here")
        if has_news:
            yield view.progress(_since_s(plan))
        if until_end and refused and ended_at is None:
            raise HostsError(refused)

    def job(self, wanted: str, cluster: str | None = None) -> tuple[JobRecord, LaunchPlan]:
        """wanted, cluster: as `Store.find_job` takes them."""
        found = self.store.find_job(wanted, cluster)
        return self.store.job_record(found), self.store.plan(found)

    def hosts_of(
        self, plan: LaunchPlan, only: Sequence[str] = (), without: Collection[str] = ()
    ) -> tuple[dict[str, Host], dict[str, HostError]]:
        """The job's hosts that can be reached now, and the errors of those that cannot. only: none means all."""
        cluster = self.store.cluster(plan.cluster)
        known = {node.name: node for node in cluster.nodes}
        names = [node.name for node in plan.nodes if (not only or node.name in only) and node.name not in without]
        found = self.connections.open([known[name] for name in names if name in known])
        gone = [name for name in names if name not in known]
        again = f"`orch up {cluster.file}` after adding it again"
        removed = {name: HostError(name, f"is no longer in cluster {cluster.name}", again) for name in gone}
        return values(found), {**errors_by_node(found), **removed}

    def jobs(self, cluster: str | None = None, silent: Mapping[str, HostError] | None = None) -> Jobs:
        """All remembered jobs, newest first, as their hosts have them now; one that cannot be asked after keeps its
        record. silent: nodes of this cluster that were found not to answer a moment ago, and are not dialled again.
        """
        problems: dict[str, OrchError] = dict(self.store.damaged())
        found, unheard = [], dict[str, Mapping[str, HostError]]()
        for record in self.store.jobs():
            if cluster in (None, record.cluster):
                try:
                    now, away = (record, {}) if record.id in problems else self._asked(record, silent or {})
                    if away and now.state not in ENDED:
                        unheard[now.id] = away
                    found.append(now)
                except OrchError as error:  # its cluster is damaged or forgotten
                    found.append(record)
                    problems[record.id] = error
        return Jobs(tuple(found), problems, unheard)

    def refresh(self, record: JobRecord) -> JobRecord:
        """The record as the hosts have it now; unchanged where none answers or it has ended.

        A start that its controller left half done is undone first.
        """
        return self._asked(record, {})[0]

    def _asked(self, record: JobRecord, silent: Mapping[str, HostError]) -> tuple[JobRecord, dict[str, HostError]]:
        """The same, and the hosts that gave no answer."""
        if record.state in ENDED:
            return record, {}
        plan = self.store.plan(record.id)
        launched = not self.store.home.launching(record.id).exists()  # before the hosts are asked
        away = {node.name: silent[node.name] for node in plan.nodes if node.name in silent}
        hosts, unreachable = self.hosts_of(plan, without=away)
        found: dict[str, Mapping[str, Any] | HostError] = {**away, **unreachable, **control.agents(plan, hosts)}
        if self.store.is_half_started(record.id):
            if is_half_started(found):
                found = {**away, **unreachable, **self._end(plan, hosts, fence=True)}
            if not errors_by_node(found):
                self.store.start_is_over(record.id)
        return self._remember(plan, found, launched=launched), errors_by_node(found)

    def cancel(self, plan: LaunchPlan) -> tuple[JobRecord, list[str]]:
        """Ends the job everywhere, whatever we remember of it, and waits for it. Returns its record and, host by host,
        what would not end or cannot be seen. Raises UsageError for a job that is somebody else's.
        """
        if plan.owner and plan.owner != read_owner(self.store.home):
            raise UsageError(
                f"{plan.job} belongs to {plan.owner.name}",
                "it is theirs to end; if that was you, `orch jobs --rescan --adopt` makes it yours",
            )
        hosts, unreachable = self.hosts_of(plan)
        half = self.store.is_half_started(plan.job)
        found = {**unreachable, **self._end(plan, hosts, fence=half)}
        if half and not errors_by_node(found):
            self.store.start_is_over(plan.job)
        return self._remember(plan, found), [line for name in found for line in _stayed(name, found[name])]

    def _end(
        self, plan: LaunchPlan, hosts: Mapping[str, Host], *, fence: bool
    ) -> dict[str, Mapping[str, Any] | HostError]:
        """Asks these hosts to end the job, and waits for their last records."""
        found: dict[str, Mapping[str, Any] | HostError] = {**errors_by_node(control.cancel(plan, hosts, fence=fence))}
        deadline = time.monotonic() + 2 * plan.grace_s + CANCEL_S
        for name, item in watch_records(plan, hosts):
            if isinstance(item, HostError):
                found[name] = item
            elif isinstance(item, Agent):
                found[name] = item.record
            if time.monotonic() > deadline:
                break
        return found

    def rescan(self, clusters: Sequence[str]) -> Jobs:
        """Asks every host of these clusters for jobs that are unknown or damaged here, and remembers them again.

        Gives the jobs that were rebuilt, and by host or job what could not be.
        """
        rebuilt, problems, notices = [], dict[str, OrchError](), list[str]()
        for name in clusters:
            try:
                rebuilt += self._rescan(self.store.cluster(name), problems, notices, clusters)
            except StateError as error:
                problems[name] = error
        for job_id, lost in self.store.damaged().items():
            if isinstance(lost, StateError):
                remedy = f"no host that answered knows it; remove {self.store.home.job_folder(job_id)} to forget it"
                problems[job_id] = StateError(lost.message, remedy)
        return Jobs(tuple(rebuilt), problems, notices=tuple(notices))

    def _rescan(
        self, cluster: Cluster, problems: dict[str, OrchError], notices: list[str], asked_too: Sequence[str]
    ) -> list[JobRecord]:
        sound = [job_id for job_id in self.store.job_ids() if job_id not in self.store.damaged()]
        newer = [job_id for job_id, error in self.store.damaged().items() if not isinstance(error, StateError)]
        known = [*sound, *newer]
        deadline_s = control.RECALL_S
        asked = self.connections.each(cluster.nodes, lambda host: control.recall(host, known), deadline_s=deadline_s)
        answers = values(asked)
        problems |= errors_by_node(asked)
        found = rescan.recall(answers, cluster)
        for other, jobs in found.elsewhere.items():
            if other not in asked_too:
                notices.append(f"skipped {counted(len(jobs), 'job')} of cluster {other} on the hosts of {cluster.name}")
        for number, words in enumerate(found.left_out):
            problems[f"{cluster.name} {number}"] = OrchError(words, "it stays on its host, untouched")
        rebuilt = []
        for job_id, plan in found.plans.items():
            agents: dict[str, Mapping[str, Any] | HostError] = {**rescan.agents_of(job_id, plan, answers)}
            record = combine(plan, agents, rescan.record_of(plan), datetime.now(timezone.utc))
            self.store.save_job(record, plan)
            if plan.owner != read_owner(self.store.home):  # `orch down` takes it from nobody
                self.store.nothing_to_collect(record.id)
            rebuilt.append(record)
        return rebuilt

    def not_ours(self, clusters: Sequence[str]) -> dict[Owner | None, list[str]]:
        """The remembered jobs of these clusters that another home started; None: an older orch, which left no name."""
        found, own = dict[Owner | None, list[str]](), read_owner(self.store.home)
        for record in self.store.jobs():
            with suppress(OrchError):
                owner = self.store.plan(record.id).owner
                if record.cluster in clusters and owner != own:
                    found.setdefault(owner, []).append(record.id)
        return found

    def adopt(self, jobs: Sequence[str]) -> dict[str, HostError]:
        """Makes these remembered jobs ours, on every host of theirs; gives the hosts where that could not be done."""
        owner, failed = read_owner(self.store.home), dict[str, HostError]()
        plans = [self.store.plan(wanted) for wanted in jobs]
        for name in {plan.cluster for plan in plans}:
            ours = [plan for plan in plans if plan.cluster == name]
            missed = errors_by_node(self.clusters.adopt(self.store.cluster(name), [plan.job for plan in ours]))
            failed |= missed
            for plan in ours:
                if not missed.keys() & {node.name for node in plan.nodes}:
                    self.store.save_job(self.store.job_record(plan.job), plan.model_copy(update={"owner": owner}))
        return failed

    def _remember(
        self, plan: LaunchPlan, found: Mapping[str, Mapping[str, Any] | HostError], *, launched: bool = False
    ) -> JobRecord:
        now = datetime.now(timezone.utc)
        return self.store.change_job(plan.job, lambda known: combine(plan, found, known, now, launched=launched))

    # ---- cleaning up ------------------------------------------------------------------------------------------

    def down(self, cluster: Cluster) -> dict[str, Cleared | HostError]:
        """Ends this cluster's jobs and removes what is ours from its hosts; remembers how they ended, and that their
        files are gone.
        """
        answers = self.clusters.down(cluster)
        cleared, now = values(answers), now_utc()
        for wanted in {job_id for answer in cleared.values() for job_id in answer.jobs} & {*self.store.job_ids()}:
            with suppress(OrchError):  # its plan is damaged
                plan = self.store.plan(wanted)
                told = {node.name: cleared[node.name].jobs for node in plan.nodes if node.name in cleared}
                if last := {name: jobs[wanted] for name, jobs in told.items() if wanted in jobs}:
                    self.store.files_removed(wanted, now, list(last))
                    self._remember(plan, last)
        if not errors(answers):
            held = {there.job for answer in cleared.values() for there in answer.left}
            for wanted in self.store.uncollected(cluster.name):
                if wanted not in held:
                    self.store.nothing_to_collect(wanted)
        return answers

    # ---- files ------------------------------------------------------------------------------------------------

    def outputs(self, plan: LaunchPlan, only: Sequence[str] = ()) -> Outputs:
        """What the job wrote beside its logs, as its hosts list it now. only: of these nodes; none means all. Raises
        OrchError where no host holds anything of the job any more.
        """
        if is_removed(self.store, plan):
            raise nothing_left(self.store, plan)
        hosts, unreachable = self._own_hosts(plan, only)
        listed = list_outputs(hosts, {name: [plan.job] for name in hosts})
        found = {name: listings[plan.job] for name, listings in values(listed).items()}
        if len(found) == len(plan.nodes) and all(listing.gone for listing in found.values()):
            raise nothing_left(self.store, plan)
        return Outputs(found, {**unreachable, **errors_by_node(listed)})

    def unpulled(self, cluster: Cluster) -> Unpulled:
        """Of the jobs that `down` would remove: what they wrote and no remembered run folder has."""
        plans, own = {}, read_owner(self.store.home)
        for record in self.store.jobs():
            with suppress(OrchError):  # one that is damaged
                plan = self.store.plan(record.id)
                if record.cluster == cluster.name and plan.owner == own and not is_removed(self.store, plan):
                    plans[record.id] = plan
        known = [node.name for node in cluster.nodes]
        asked = {
            name: [job_id for job_id, plan in plans.items() if name in {node.name for node in plan.nodes}]
            for name in known
        }
        found = self.connections.open([cluster.node(name) for name, jobs in asked.items() if jobs])
        listed = list_outputs(values(found), asked)
        files: dict[str, list[tuple[str, Output]]] = {}
        for name, listings in values(listed).items():
            for job_id, listing in listings.items():
                runs = [RunFolder(folder) for folder in self.store.run_folders(job_id)]
                if lacking := pull.nowhere(runs, name, listing.files):
                    files.setdefault(job_id, []).extend((name, output) for output in lacking)
        return Unpulled(files, {**errors_by_node(found), **errors_by_node(listed)})

    def pull(
        self,
        plan: LaunchPlan,
        wanted: Mapping[str, Sequence[Output]],
        out: Path,
        show: Callable[[pull.Progress], None] = lambda _: None,
    ) -> dict[str, Pulled | HostError]:
        """Brings these files of these nodes into `out/<job>/`. Raises HeldError while somebody else does."""
        run = RunFolder(out / plan.job)
        own_folder(run.root)
        with collect.alone(run.pull_lock, f"is pulling into {run.root}", "pull again when it is done"):
            self.store.remember_run(plan.job, run.root)
            hosts, unreachable = self._own_hosts(plan, list(wanted))
            pulled = pull.pull(
                plan, hosts, run, wanted, show, lambda name: self._at(plan, self.connections.reopen(name))
            )
        return {**pulled, **unreachable}

    def _own_hosts(self, plan: LaunchPlan, only: Sequence[str]) -> tuple[dict[str, Host], dict[str, HostError]]:
        """Of the job, these of its nodes; each with the work folder that the job has there."""
        known = [node.name for node in plan.nodes]
        for name in only:
            if name not in known:
                raise UsageError(f"{name}: no node of {plan.job}", f"its nodes: {', '.join(known)}")
        hosts, unreachable = self.hosts_of(plan, only)
        return {name: self._at(plan, host) for name, host in hosts.items()}, unreachable

    @staticmethod
    def _at(plan: LaunchPlan, host: Host) -> Host:
        return replace(host, workdir=plan.node(host.node).workdir)

    # ---- results ----------------------------------------------------------------------------------------------

    def collect(
        self,
        plan: LaunchPlan,
        out: Path,
        progress: Callable[[str, int], None] = lambda *_: None,
        *,
        limit_bytes: int = collect.MAX_LOG_BYTES,
    ) -> Report:
        """Pulls what is new into `out/<job>/`, analyses it, writes the report. limit_bytes: of a log, no more.

        While somebody else collects into that folder, it is only read. Raises HeldError where there is nothing yet.
        """
        if is_removed(self.store, plan):
            raise nothing_left(self.store, plan)
        run = RunFolder(out / plan.job)
        own_folder(run.root)
        try:
            with collect.claimed(run):
                hosts, unreachable = self.hosts_of(plan)
                collected = collect.collect(plan, hosts, run, progress, limit_bytes=limit_bytes)
                record, failed = self._remember(plan, collected.agents), {**unreachable, **collected.errors}
                if record.state != "starting" and _is_gone(plan, collected.agents):
                    raise nothing_left(self.store, plan)
                self.store.remember_run(plan.job, run.root)
                write_record(run.plan, plan)
                write_record(run.job, record)
                summary = self.report(run)
            if record.state in FINAL_STATES and not failed:
                self.store.nothing_to_collect(plan.job)
            notices = (*collected.notices, *(notice.text for notice in _dropped(plan, collected.agents)))
            return Report(summary, run, collected.new_bytes, failed, notices)
        except collect.HeldError as error:
            if not run.summary.is_file():
                raise
            said = f"{error.message}; this is what the collect before it found. {error.remedy}"
            return Report(Summary.load(run), run, 0, {}, (said,))

    def report(self, run: RunFolder) -> Summary:
        """Analyses a collected run folder and writes its report; needs no host."""
        from orchestrator.results.analyse import analyse
        from orchestrator.views.report import write_report

        summary = analyse(run)
        write_report(run, summary)
        return summary


def _is_gone(plan: LaunchPlan, agents: Mapping[str, Mapping[str, Any] | HostError]) -> bool:
    """Whether all hosts of the job say that they hold nothing of it."""
    gone = [isinstance(agent, Mapping) and agent.get("gone") is True for agent in agents.values()]
    return len(gone) == len(plan.nodes) and all(gone)


def _with_outlook(draft: Draft, profiles: Profiles, measured: Sequence[Path]) -> tuple[LaunchPlan, Faster | None]:
    """The plan with what it is foreseen to do, as far as speeds and links are known; where the person leaves the
    strategy to us, with the best one. And the same settings on fewer hosts, where that is faster. measured: run folders
    of collectives, beside those of the usual folder. Raises UsageError where that asks for what is not known.
    """
    request, settings, plan = draft.request, draft.training, build_plan(draft)
    if request.kind != "experiment" or (settings and settings.profile_s):
        return plan, None
    try:
        view = look(plan, profiles, read_network(RUNS, plan, measured))
    except UsageError as error:
        if request.best_way:
            raise
        return build_plan(with_rounds(draft, error)), None
    if settings and request.best_way:
        draft = with_best_way(draft, settings, view)
    plan = build_plan(with_rounds(draft, view))
    notes = (*plan.notes, *memory_notes(plan, view))
    found = {"prediction": foreseen(plan, view), "faster": predicted(plan, view, request.chosen), "notes": notes}
    return plan.model_copy(update=found), without_slow(plan, view)


def _left_out_words(plan: LaunchPlan, better: Faster, request: RunRequest) -> str:
    out = ", ".join(node.name for node in plan.nodes if node.name not in better.hosts)
    why = "strategy=auto" if request.best_way else "shares=measured"
    every = ",".join(node.name for node in plan.nodes)
    return f"{why} leaves out {out}: {better.words}; --nodes {every} keeps them"


def _since_s(plan: LaunchPlan) -> float:
    """Since the job was planned, by this machine's clock."""
    with suppress(ValueError):
        return max(0.0, time.time() - datetime.fromisoformat(plan.created).timestamp())
    return 0.0


def _dropped(plan: LaunchPlan, records: Mapping[str, Mapping[str, Any] | HostError]) -> Iterator[Notice]:
    """What the ranks printed and a disk did not take: by the word of each host or, where its record cannot be read any
    more, of the master, which heard of it before.
    """
    heard = _mapping(records.get(plan.master), "dropped")
    for node in plan.nodes:
        ranks = _mapping(records.get(node.name), "ranks")
        for rank in map(str, node.rank_numbers):
            sizes = [_mapping(ranks, rank).get("dropped_bytes"), _mapping(heard, node.name).get(rank)]
            size = max((size for size in sizes if isinstance(size, int)), default=0)
            if 0 < size < 1 << 63:
                lost = f"{size} bytes of what rank {rank} printed are lost"
                yield Notice(f"{node.name}: the disk of its work folder was full or failed, {lost}; the job went on")


def _mapping(told: Any, key: str) -> Mapping[str, Any]:
    """What a host says under this key; {} where that is no object."""
    found = told.get(key) if isinstance(told, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _stayed(name: str, found: Mapping[str, Any] | HostError) -> list[str]:
    """What this host does not prove to be gone."""
    if isinstance(found, HostError):
        return [str(found)]
    if found.get("alive"):
        return [f"{name}: its supervisor still runs (state {one_line(found.get('state'), 20)})"]
    return [f"{name}: {process}" for process in understood(name, lambda: words_of(found.get("leftovers", [])))]


def _job_id(name: str) -> str:
    """`resnet152_cifar-20261121-0912-k3f`: what, when (UTC), and three letters against coincidence."""
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", Path(name).stem)[:40].strip("-_") or "job"
    suffix = "".join(secrets.choice(_ID_LETTERS) for _ in range(3))
    return f"{slug}-{datetime.now(timezone.utc):%Y%m%d-%H%M}-{suffix}"
