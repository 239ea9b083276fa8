"""A run that waits for its GPUs: its tickets on its hosts, renewed until its turn has come.

    with Turn(plan, memory, connections, say, limit_s=None) as turn:     # a ticket on every host, until the block ends
        turn.wait()                                                      # its GPUs are free, and nobody is before it
        ...                                                              # start; the tickets hold the place meanwhile

The hosts decide: each refuses a start that is not its turn (`remote/keeper.py`), and the claim on a GPU is what makes
one job its only one. Whose turn it is, `remote/turns.py` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.errors import ConnectError, HostError, HostsError, OrchError, RefusedError, TurnError
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.occupied import OccupiedError
from orchestrator.jobs.queued import HostAnswer, Rival, promised, queue_of, read_answer, standing_of
from orchestrator.jobs.record import ENDED, FINAL_STATES, JobRecord
from orchestrator.jobs.remembered import RememberedJobs, WaitingRun
from orchestrator.owner import read_owner
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors, errors_by_node, for_each, values
from orchestrator.units import format_duration

ASK_S = 30.0
POLL_S, MOST_POLL_S = 3.0, 15.0
"""Between two looks at how it stands: the longer, the more go before, since each look costs the hosts something."""
OCCUPIED_S = 15.0
"""Between two looks at GPUs that programs other than ours are on."""
AWAY_S = 300.0
"""So long a host may give no answer while its job waits."""
TRIES = 3
"""Starts that hosts refuse although nobody is before the job."""
START_LEASE_S = 300.0
"""While the job starts, nobody renews its tickets."""
CROSSED_S = 10.0
"""So old a start may be to be one of the same moment, and so long its rival waits for it."""
LOST = "lost its ticket for this job; it is at the end of the queue again"


class Turn:
    """say: called with each line that a person should read. limit_s: so long it waits; None: as long as it takes."""

    def __init__(
        self,
        plan: LaunchPlan,
        memory: RememberedJobs,
        connections: Connections,
        say: Callable[[str], None],
        limit_s: float | None,
    ) -> None:
        self._plan, self._memory, self._say, self._limit_s = plan, memory, say, limit_s
        self._hosts = _Hosts(plan, connections)
        self._began = time.monotonic()
        self._heard = dict.fromkeys(self._hosts.names, self._began)
        self._told: object = None
        self._refused = 0
        self._silent = set[tuple[str, str]]()
        self._starts: float | None = None
        """The moment by which it was promised to start."""
        self._pause_s = POLL_S

    def __enter__(self) -> Turn:
        try:
            self._take()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._leave()
        if kind and issubclass(kind, KeyboardInterrupt):
            self._say(f"{self._plan.job} has left the queue")

    def wait(self) -> None:
        """Raises TurnError where the time is over or somebody cancelled it, RefusedError where a host stays away."""
        while not self._has_come():
            self._refuse_late()
            time.sleep(self._pause_s)
        self._told = None
        self._hosts.ask("renew", lease_s=START_LEASE_S)

    def goes_on(self, error: HostsError) -> bool:
        """Whether a start failed because the GPUs are in use after all. Then some time has passed."""
        if all(isinstance(each, OccupiedError) for each in error.errors):
            self._tell(error.message, f"waits: {error.message}")
            self._refuse_late()
            time.sleep(OCCUPIED_S)
            return True
        if not all(type(each) is HostError for each in error.errors):  # any other says that no answer came
            return False
        if self._has_come():  # the job that was in the way has ended since, or something else is wrong
            self._refused += 1
            time.sleep(POLL_S)
        return self._refused < TRIES

    def _has_come(self) -> bool:
        now = time.monotonic()
        promise = {} if self._starts is None else {"starts_s": max(0.0, self._starts - now)}
        answers = self._hosts.ask("renew", **promise)
        self._refuse_away(errors_by_node(answers))
        found = values(answers)
        if any(answer.cancelled for answer in found.values()):
            raise TurnError(f"{self._plan.job} was cancelled while it waited", "", exit_code=1)
        if lost := [name for name, answer in found.items() if answer.lost]:
            self._leave()
            self._take()
            self._say(f"{', '.join(lost)} {LOST}")
            return False
        self._name_silent(found)
        standing = standing_of(found)
        if not standing.is_turn:
            if not errors(answers):
                self._starts = promised(self._starts, now, standing.starts_s, self._plan.longest_s)
            is_told = self._starts is None or bool(promise)
            self._pause_s = min(POLL_S * max(1, standing.place - 1), MOST_POLL_S) if is_told else POLL_S
            self._tell(standing.behind, f"{self._plan.job} waits: {standing.words()}{self._by()}")
        return standing.is_turn and not errors(answers)

    def _take(self) -> None:
        """On every host, with one number for all. Raises RefusedError."""
        self._starts = None
        seen = self._hosts.ask("look")
        if not errors(seen):
            number = 1 + max(
                (ticket.number for answer in values(seen).values() for ticket in answer.tickets), default=0
            )
            seen = self._hosts.ask("take", number=number)
        if errors(seen):
            raise RefusedError(errors(seen))
        run = WaitingRun(schema=1, job=self._plan.job, cluster=self._plan.cluster, nodes=tuple(self._hosts.names))
        self._memory.remember_waiting(run)

    def _leave(self) -> None:
        self._memory.forget_waiting(self._plan.job)  # first: without tickets it would be one whose controller died
        self._hosts.ask("leave")

    def _by(self) -> str:
        """By when it starts at the latest, where that is known."""
        if self._starts is None:
            return ""
        return f"; starts within {format_duration(max(0.0, self._starts - time.monotonic()))}"

    def _tell(self, what: object, line: str) -> None:
        """Once, until something else is to be said."""
        if what != self._told:
            self._told = what
            self._say(line)

    def _name_silent(self, found: Mapping[str, HostAnswer]) -> None:
        """Once for each login of a host."""
        silent = {(name, login) for name, answer in found.items() for login in answer.silent}
        for name, login in sorted(silent - self._silent):
            whose = login or "another login"
            self._say(f"{name}: sockets of {whose} look like tickets but give no answer; they are passed over")
        self._silent |= silent

    def _refuse_away(self, away: Mapping[str, HostError]) -> None:
        """Says which hosts give no answer; raises RefusedError for those that have not for AWAY_S."""
        now = time.monotonic()
        self._heard |= {name: now for name in self._heard if name not in away}
        if gone := [error for name, error in away.items() if now > self._heard[name] + AWAY_S]:
            raise RefusedError(gone)
        for error in away.values():
            self._tell(error.message, f"{error.message}; asking again for {format_duration(AWAY_S)}")

    def _refuse_late(self) -> None:
        if self._limit_s is not None and time.monotonic() > self._began + self._limit_s:
            waited = format_duration(self._limit_s)
            raise TurnError(f"{self._plan.job} did not come to its turn within {waited}", "`orch jobs` shows who waits")


def crossed(plan: LaunchPlan, connections: Connections, error: HostsError) -> bool:
    """Whether these refusals may come from another start at the same moment, that was refused likewise: each of the two
    had a GPU that the other needs. Then neither runs, and a ticket decides who goes first.
    """
    hosts = _Hosts(plan, connections)
    names_gpu = [any(gpu in each.message for gpu in plan.node(each.node).gpu_uuids) for each in error.errors]
    if not all(names_gpu) or len(names_gpu) == len(hosts.names):  # else this start had a GPU itself
        return False
    answers = hosts.ask("look")
    standing = standing_of(values(answers))
    just_now = all(each.since_s is not None and each.since_s < CROSSED_S for each in standing.holders)
    return just_now and not standing.before and not errors(answers)


class _Hosts:
    """A job's hosts with GPUs, asked about its tickets all at once. One that was lost is connected to again."""

    def __init__(self, plan: LaunchPlan, connections: Connections) -> None:
        self._plan, self._connections = plan, connections
        self.names = [node.name for node in plan.nodes if node.gpu_uuids]

    def ask(self, action: str, **more: Any) -> dict[str, HostAnswer | HostError]:
        owner = self._plan.owner.id if self._plan.owner else ""
        words = {"action": action, "job": self._plan.job, "owner": owner, "longest_s": self._plan.longest_s, **more}
        return for_each({name: name for name in self.names}, partial(self._one, words), deadline_s=2 * ASK_S)

    def _one(self, words: Mapping[str, Any], name: str) -> HostAnswer:
        request = {**words, "node": name, "gpus": list(self._plan.node(name).gpu_uuids)}
        try:
            return _asked(self._connections.current(name), request)
        except ConnectError:  # the link may have broken since the last time
            return _asked(self._connections.reopen(name), request)


def _asked(host: ConnectedHost, words: Mapping[str, Any]) -> HostAnswer:
    said = ask.ask(host, "waiting", {"workdir": host.workdir, **words}, timeout_s=ASK_S)
    if words["action"] in ("leave", "cancel"):
        return HostAnswer(lost=said.get("lost") is True)
    return ask.understood(host.node, lambda: read_answer(host.node, said))


def _looked(gpus: Mapping[str, Sequence[str]], host: ConnectedHost) -> HostAnswer:
    return _asked(host, {"action": "look", "gpus": gpus.get(host.node, [])})


# ---- from another command ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Waiting:
    """By cluster who waits, in their order. own: runs of this home. lost: those whose controllers died, and lost their
    places.
    """

    runs: Mapping[str, tuple[Rival, ...]]
    own: frozenset[str] = frozenset()
    lost: tuple[str, ...] = ()


class Queue:
    """Who waits on the hosts of this home's runs."""

    def __init__(self, memory: RememberedJobs, connections: Connections) -> None:
        self._memory, self._connections = memory, connections

    def cancel(self, wanted: str) -> str | None:
        """The run that is out of the queue: its controller hears of it and gives up. None where none that waits is
        meant. Raises HostsError.
        """
        run = self._memory.waiting_run(wanted)
        if not run or self._has_come(run.job):
            return None
        words = {"action": "cancel", "job": run.job, "owner": read_owner(self._memory.home).id, "gpus": []}
        answers = self._each(run.cluster, run.nodes, lambda host: _asked(host, {**words, "node": host.node}))
        if errors(answers):
            raise HostsError(errors(answers))
        heard = not all(answer.lost for answer in values(answers).values())
        if not heard:
            self._memory.forget_waiting(run.job)
        return run.job if heard else None

    def _has_come(self, job: str) -> bool:
        """Whether it runs, or is about to."""
        return job in self._memory.job_ids() and self._memory.job_record(job).state not in ENDED

    def waiting(self, jobs: Sequence[JobRecord], cluster: str | None = None) -> Waiting:
        """Who waits for the GPUs of those of these jobs that have not ended, and on the hosts of this home's waiting
        runs. cluster: only runs of this one.
        """
        nodes = self._nodes_of(jobs)
        runs = [run for run in self._memory.waiting_runs() if cluster in (None, run.cluster)]
        found, lost = dict[str, tuple[Rival, ...]](), list[str]()
        for name in sorted({*nodes, *(run.cluster for run in runs)}):
            own = [run for run in runs if run.cluster == name]
            there = sorted({*nodes.get(name, ()), *(node for run in own for node in run.nodes)})
            with suppress(OrchError):  # a damaged or forgotten cluster: `orch jobs` says so of its jobs
                answers = self._each(name, there, partial(_looked, self._gpus_of(name)))
                found[name] = queue_of(values(answers))
                lost += self._forget_gone(own, found[name], errors_by_node(answers))
        return Waiting(found, frozenset(run.job for run in runs).difference(lost), tuple(lost))

    def _nodes_of(self, jobs: Sequence[JobRecord]) -> dict[str, set[str]]:
        """By cluster: where jobs that have not ended have GPUs."""
        nodes: dict[str, set[str]] = {}
        for job in jobs:
            if job.state not in FINAL_STATES:
                with suppress(OrchError):  # a damaged plan, which is said elsewhere
                    if on_gpus := {node.name for node in self._memory.plan(job.id).nodes if node.gpu_uuids}:
                        nodes.setdefault(job.cluster, set()).update(on_gpus)
        return nodes

    def _gpus_of(self, cluster: str) -> dict[str, list[str]]:
        return {node: [gpu.uuid for gpu in facts.gpus] for node, facts in self._memory.cluster(cluster).facts.items()}

    def _forget_gone(
        self, runs: Sequence[WaitingRun], queue: Sequence[Rival], away: Mapping[str, HostError]
    ) -> Iterator[str]:
        """Those whose controllers died while they waited: none that has left the queue or started meanwhile."""
        there = {rival.job for rival in queue}
        for run in runs:
            if run.job not in there and away.keys().isdisjoint(run.nodes) and run in self._memory.waiting_runs():
                self._memory.forget_waiting(run.job)
                if run.job not in self._memory.job_ids():
                    yield run.job

    def _each(
        self, cluster: str, names: Sequence[str], action: Callable[[ConnectedHost], HostAnswer]
    ) -> dict[str, HostAnswer | HostError]:
        wanted = [node for node in self._memory.cluster(cluster).nodes if node.name in names]
        return self._connections.each(wanted, action, deadline_s=ASK_S)
