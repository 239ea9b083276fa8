"""The queue for GPUs: a waiting run's tickets on its hosts, renewed until it may start.

    with Turn(plan, memory, connections, say, limit_s=None) as turn:     # a ticket on every host until the block ends
        turn.wait()                                                      # its GPUs are free, and no job is ahead of it
        ...                                                              # start

The hosts decide: each refuses a start out of turn (`remote/keeper.py`, `remote/gpu_queue.py`).
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
from orchestrator.jobs.job_store import ENDED, FINAL_STATES, JobRecord, JobStore, WaitingRun
from orchestrator.jobs.queue_place import HostAnswer, Rival, number_after, place_of, queue_of, read_answer
from orchestrator.owner import read_owner
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors, errors_by_node, for_each, values
from orchestrator.units import format_duration

ASK_S = 30.0
POLL_S, MOST_POLL_S = 3.0, 15.0
"""Longer with more jobs ahead, since each query costs the hosts something."""
OCCUPIED_S = 15.0
"""For GPUs that other programs use."""
AWAY_S = 300.0
"""Seconds without an answer of a host before the run gives up."""
TRIES = 3
"""Refused starts although no job is ahead."""
START_LEASE_S = 300.0
"""Tickets are not renewed while the job starts."""
CROSSED_S = 10.0
"""Two starts within this time count as simultaneous; the second waits this long for the first."""
LOST = "lost its ticket for this job; it is at the end of the queue again"


class Turn:
    """say: gets each line for the user."""

    def __init__(
        self,
        plan: LaunchPlan,
        memory: JobStore,
        connections: Connections,
        say: Callable[[str], None],
        limit_s: float | None,
    ) -> None:
        self._plan, self._memory, self._say, self._limit_s = plan, memory, say, limit_s
        self._hosts = _Hosts(plan, connections)
        self._began = time.monotonic()
        self._answered = dict.fromkeys(self._hosts.names, self._began)
        self._reported: object = None
        self._refused = 0
        self._silent = set[tuple[str, str]]()
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
        """Raises TurnError at the time limit or if cancelled, RefusedError if a host stays away."""
        while not self._has_come():
            self._refuse_late()
            time.sleep(self._pause_s)
        self._reported = None
        self._hosts.ask("renew", lease_s=START_LEASE_S)

    def goes_on(self, error: HostsError) -> bool:
        """error: of the failed start. Pauses before it returns True."""
        if all(isinstance(each, OccupiedError) for each in error.errors):
            self._report(error.message, f"waits: {error.message}")
            self._refuse_late()
            time.sleep(OCCUPIED_S)
            return True
        if not all(type(each) is HostError for each in error.errors):  # any other type means that no answer came
            return False
        if self._has_come():  # the job that was in the way has ended since, or something else is wrong
            self._refused += 1
            time.sleep(POLL_S)
        return self._refused < TRIES

    def _has_come(self) -> bool:
        answers = self._hosts.ask("renew")
        self._refuse_away(errors_by_node(answers))
        present = values(answers)
        if any(answer.cancelled for answer in present.values()):
            raise TurnError(f"{self._plan.job} was cancelled while it waited", "", exit_code=1)
        if lost := [name for name, answer in present.items() if answer.lost]:
            if not errors(answers):  # else hosts are still coming back, one by one
                self._take_anew(lost)
            return False
        self._report_silent(present)
        queue = place_of(present)
        if not queue.is_turn:
            self._pause_s = min(POLL_S * max(1, queue.place - 1), MOST_POLL_S)
            self._report(queue.behind, f"{self._plan.job} waits: {queue.words()}")
        return queue.is_turn and not errors(answers)

    def _take_anew(self, lost: Sequence[str]) -> None:
        self._leave()
        try:
            self._take()
        except RefusedError as error:
            if any(type(each) is HostError for each in error.errors):  # a refusal; any other type: no answer came
                raise
            return
        self._say(f"{', '.join(lost)} {LOST}")

    def _take(self) -> None:
        """Raises RefusedError."""
        answers = self._hosts.ask("look")
        if not errors(answers):
            numbers = (ticket.number for answer in values(answers).values() for ticket in answer.tickets)
            number = number_after(numbers, self._plan.asked.priority)
            answers = self._hosts.ask("take", number=number)
        if errors(answers):
            raise RefusedError(errors(answers))
        run = WaitingRun(schema=1, job=self._plan.job, cluster=self._plan.cluster, nodes=tuple(self._hosts.names))
        self._memory.remember_waiting(run)

    def _leave(self) -> None:
        self._memory.forget_waiting(self._plan.job)  # first: a run without tickets looks as if its controller died
        self._hosts.ask("leave")

    def _report(self, state: object, line: str) -> None:
        if state != self._reported:
            self._reported = state
            self._say(line)

    def _report_silent(self, answers: Mapping[str, HostAnswer]) -> None:
        silent = {(name, login) for name, answer in answers.items() for login in answer.silent}
        for name, login in sorted(silent - self._silent):
            whose = login or "another login"
            self._say(f"{name}: sockets of {whose} look like tickets but give no answer; they are passed over")
        self._silent |= silent

    def _refuse_away(self, away: Mapping[str, HostError]) -> None:
        """Reports hosts without an answer. Raises RefusedError after AWAY_S."""
        now = time.monotonic()
        self._answered |= {name: now for name in self._answered if name not in away}
        if gone := [error for name, error in away.items() if now > self._answered[name] + AWAY_S]:
            raise RefusedError(gone)
        for error in away.values():
            self._report(error.message, f"{error.message}; asking again for {format_duration(AWAY_S)}")

    def _refuse_late(self) -> None:
        if self._limit_s is not None and time.monotonic() > self._began + self._limit_s:
            waited = format_duration(self._limit_s)
            raise TurnError(f"{self._plan.job} was still queued after {waited}", "`orch jobs` shows the queue")


def crossed(plan: LaunchPlan, connections: Connections, error: HostsError) -> bool:
    """Whether a simultaneous start may have caused these refusals: each has a GPU that the other needs. Tickets then
    decide the order.
    """
    hosts = _Hosts(plan, connections)
    names_gpu = [any(gpu in each.message for gpu in plan.node(each.node).gpu_uuids) for each in error.errors]
    if not all(names_gpu) or len(names_gpu) == len(hosts.names):  # else this start had a GPU itself
        return False
    answers = hosts.ask("look")
    queue = place_of(values(answers))
    just_now = all(each.since_s is not None and each.since_s < CROSSED_S for each in queue.holders)
    return just_now and not queue.before and not errors(answers)


class _Hosts:
    def __init__(self, plan: LaunchPlan, connections: Connections) -> None:
        self._plan, self._connections = plan, connections
        self.names = [node.name for node in plan.nodes if node.gpu_uuids]

    def ask(self, action: str, **more: Any) -> dict[str, HostAnswer | HostError]:
        owner = self._plan.owner.id if self._plan.owner else ""
        request = {"action": action, "job": self._plan.job, "owner": owner, **more}
        return for_each({name: name for name in self.names}, partial(self._ask_host, request), deadline_s=2 * ASK_S)

    def _ask_host(self, request: Mapping[str, Any], name: str) -> HostAnswer:
        request = {**request, "node": name, "gpus": list(self._plan.node(name).gpu_uuids)}
        try:
            return _ask(self._connections.current(name), request)
        except ConnectError:  # the connection may have broken since the last time
            return _ask(self._connections.reopen(name), request)


def _ask(host: ConnectedHost, request: Mapping[str, Any]) -> HostAnswer:
    answer = ask.ask(host, "gpu_queue", {"workdir": host.workdir, **request}, timeout_s=ASK_S)
    if request["action"] in ("leave", "cancel"):
        return HostAnswer(lost=answer.get("lost") is True)
    return ask.understood(host.node, lambda: read_answer(host.node, answer))


def _look(gpus: Mapping[str, Sequence[str]], host: ConnectedHost) -> HostAnswer:
    return _ask(host, {"action": "look", "gpus": gpus.get(host.node, [])})


# ---- from another command ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Waiting:
    """runs: by cluster, in order. own: this home's. lost: runs whose controllers died."""

    runs: Mapping[str, tuple[Rival, ...]]
    own: frozenset[str] = frozenset()
    lost: tuple[str, ...] = ()


class Queue:
    def __init__(self, memory: JobStore, connections: Connections) -> None:
        self._memory, self._connections = memory, connections

    def cancel(self, wanted: str) -> str | None:
        """Its controller then gives up. Returns the run's id, None if no queued run is meant. Raises HostsError."""
        run = self._memory.waiting_run(wanted)
        if not run or self._has_started(run.job):
            return None
        request = {"action": "cancel", "job": run.job, "owner": read_owner(self._memory.home).id, "gpus": []}
        answers = self._each(run.cluster, run.nodes, lambda host: _ask(host, {**request, "node": host.node}))
        if errors(answers):
            raise HostsError(errors(answers))
        if all(answer.lost for answer in values(answers).values()):
            self._memory.forget_waiting(run.job)
            return None
        return run.job

    def _has_started(self, job: str) -> bool:
        return job in self._memory.job_ids() and self._memory.job_record(job).state not in ENDED

    def waiting(self, jobs: Sequence[JobRecord], cluster: str | None = None) -> Waiting:
        """On the hosts of these jobs, if not ended, and of this home's queued runs."""
        nodes = self._nodes_of(jobs)
        runs = [run for run in self._memory.waiting_runs() if cluster in (None, run.cluster)]
        queues, lost = dict[str, tuple[Rival, ...]](), list[str]()
        for name in sorted({*nodes, *(run.cluster for run in runs)}):
            own = [run for run in runs if run.cluster == name]
            asked = sorted({*nodes.get(name, ()), *(node for run in own for node in run.nodes)})
            with suppress(OrchError):  # a damaged or forgotten cluster: `orch jobs` reports it with its jobs
                answers = self._each(name, asked, partial(_look, self._gpus_of(name)))
                queues[name] = queue_of(values(answers))
                lost += self._forget_gone(own, queues[name], errors_by_node(answers))
        return Waiting(queues, frozenset(run.job for run in runs).difference(lost), tuple(lost))

    def _nodes_of(self, jobs: Sequence[JobRecord]) -> dict[str, set[str]]:
        nodes: dict[str, set[str]] = {}
        for job in jobs:
            if job.state not in FINAL_STATES:
                with suppress(OrchError):  # a damaged plan is reported elsewhere
                    if on_gpus := {node.name for node in self._memory.plan(job.id).nodes if node.gpu_uuids}:
                        nodes.setdefault(job.cluster, set()).update(on_gpus)
        return nodes

    def _gpus_of(self, cluster: str) -> dict[str, list[str]]:
        return {node: [gpu.uuid for gpu in facts.gpus] for node, facts in self._memory.cluster(cluster).facts.items()}

    def _forget_gone(
        self, runs: Sequence[WaitingRun], queue: Sequence[Rival], away: Mapping[str, HostError]
    ) -> Iterator[str]:
        """Runs whose controllers died."""
        queued = {rival.job for rival in queue}
        for run in runs:
            if run.job not in queued and away.keys().isdisjoint(run.nodes) and run in self._memory.waiting_runs():
                self._memory.forget_waiting(run.job)
                if run.job not in self._memory.job_ids():
                    yield run.job

    def _each(
        self, cluster: str, names: Sequence[str], action: Callable[[ConnectedHost], HostAnswer]
    ) -> dict[str, HostAnswer | HostError]:
        wanted = [node for node in self._memory.cluster(cluster).nodes if node.name in names]
        return self._connections.each(wanted, action, deadline_s=ASK_S)
