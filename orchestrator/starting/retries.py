"""Retries of a failed job (`--retries`): the whole job, as a new one, on the remaining hosts.

retries = Retries(clusters, connections, start, say, Asked(cluster, job, only))
while job := retries.after(job):            # the ended job; the next attempt, or None
    ...                                     # follow it to its end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from orchestrator.clusters import Clusters
from orchestrator.errors import OrchError, RefusedError, TooFewError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.connections import Connections
from orchestrator.jobs import launch
from orchestrator.jobs.retry_policy import Judged, KeptCheckpoint, judge, kept_by
from orchestrator.jobs.running import RunningJob
from orchestrator.planning.job_spec import HostRange
from orchestrator.planning.launch_plan import Attempt, Earlier, LaunchPlan
from orchestrator.planning.request import ParsedJob, RunRequest
from orchestrator.transport.fanout import errors_by_node, values
from orchestrator.units import counted, format_duration, some

LONGEST_WAIT_S = 360.0
ENDED_S = 60.0
"""After twice the grace period."""
# Besides `--silence` and twice the grace period, for the end of a lost host's ranks (`remote/coordinator.py`).
LADDER_S = 12.0
LOOK_S = 1.0
_NOT_AGAIN = {
    "script": "the script's own failure, not the hosts'; `--retry-on any` also tries that again",
    "person": "a person or a time limit ended it",
}


@dataclass(frozen=True)
class Asked:
    """only: the nodes to use; () means all."""

    cluster: Cluster
    job: ParsedJob
    only: Sequence[str] = ()

    @property
    def request(self) -> RunRequest:
        return self.job.request


class Retries:
    """start: plans and launches. say: prints a line."""

    def __init__(
        self,
        clusters: Clusters,
        connections: Connections,
        start: Callable[[Asked], RunningJob],
        say: Callable[[str], None],
        asked: Asked,
    ) -> None:
        self._clusters, self._connections, self._start, self._say = clusters, connections, start, say
        self._asked = asked
        self._plans: list[LaunchPlan] = []
        self._lost: dict[str, str] = {}
        """Left out of later attempts; by host, the attempt that lost it."""

    def after(self, job: RunningJob) -> RunningJob | None:
        """The next attempt, started; None if the job is not retried. Raises OrchError if it cannot start."""
        ended_s, attempt = time.monotonic(), job.plan.attempt
        judged = judge(job.record)
        if attempt is None or judged is None or not self._goes_on(job, attempt, judged):
            return None
        self._plans.append(job.plan)
        if judged.without and not attempt.rejoin:
            self._lost[judged.without] = job.id
        failed = Earlier(job=job.id, why=judged.why)
        attempt = attempt.model_copy(update={"earlier": (*attempt.earlier, failed)})
        self._say(f"{job.id} failed: {judged.why}")
        while True:
            attempt = attempt.model_copy(update={"number": attempt.number + 1})
            self._rest(attempt)
            self._await_end(job, ended_s, rejoin=attempt.rejoin)
            try:
                return self._begin(attempt)
            except (TooFewError, RefusedError) as error:
                if attempt.number >= attempt.most or not attempt.rejoin:
                    raise
                self._say(f"attempt {attempt.words} did not start: {error.message}")

    def _goes_on(self, job: RunningJob, attempt: Attempt, judged: Judged) -> bool:
        if judged.whose in _NOT_AGAIN and not (judged.whose == "script" and attempt.any_cause):
            self._say(f"{job.id} is not tried again: {_NOT_AGAIN[judged.whose]} ({judged.why})")
            return False
        if attempt.number >= attempt.most:
            self._say(f"{job.id} is not tried again: this was attempt {attempt.words}")
            return False
        return True

    def _rest(self, attempt: Attempt) -> None:
        pause_s = min(LONGEST_WAIT_S, attempt.wait_s * 2.0 ** (attempt.number - 2))
        self._say(f"attempt {attempt.words} follows in {format_duration(pause_s)}")
        time.sleep(pause_s)

    # ---- no second gang -----------------------------------------------------------------------------------------

    def _await_end(self, job: RunningJob, ended_s: float, *, rejoin: bool) -> None:
        """Waits until no host that answers holds anything of the job, and others have had the time to end by
        themselves. Raises OrchError if something remains.
        """
        ladder_s, silence_s = 2 * job.plan.grace_s, job.plan.asked.silence_s
        is_reported = False
        while True:
            away = job.reach()
            found = launch.agents(job.plan, job.hosts)
            away |= errors_by_node(found)
            there = [name for name, record in values(found).items() if _is_there(record)]
            now_s = time.monotonic()
            if not there and (not away or now_s > ended_s + silence_s + LADDER_S + ladder_s):
                self._lost |= {} if rejoin else dict.fromkeys(away, job.id)
                return
            if there and now_s > ended_s + ENDED_S + ladder_s:
                raise OrchError(
                    f"{job.id} has not ended on {', '.join(there)}, so that no other attempt may start",
                    "`orch reap` lists what is left there, `orch reap --yes` ends it; then `orch run --resume`",
                )
            if there:
                launch.cancel(job.plan, job.hosts)
            elif not is_reported:
                waits = format_duration(ended_s + silence_s + LADDER_S + ladder_s - now_s)
                self._say(f"{some(list(away), 6)}: no answer; at most {waits} until its ranks have ended by themselves")
                is_reported = True
            time.sleep(LOOK_S)

    # ---- the next one -------------------------------------------------------------------------------------------

    def _begin(self, attempt: Attempt) -> RunningJob:
        hosts, names = self._hosts()
        cluster, asked = self._asked.cluster, self._asked.request
        before = attempt.earlier[-1]
        notes = [f"attempt {attempt.words}, after {before.job} failed: {before.why}"]
        request = replace(asked, hosts=hosts, attempt=attempt, job=None)
        if kept := self._newest(names):
            holder = self._clusters.ready(cluster, [*kept]).election.master  # of the hosts that have it
            cluster = cluster.model_copy(update={"master_pin": holder})
            request = _going_on(request, kept[holder])
            notes.append(f"goes on after update {kept[holder].updates}, from the checkpoint on {holder}")
        elif request.training and request.training.resume:
            _refuse_without(cluster.master_pin, names)
        elif request.training:
            notes.append("no checkpoint is left on these hosts: it begins at step 0")
        request = replace(request, notes=(*asked.notes, *notes))
        return self._start(Asked(cluster, replace(self._asked.job, request=request), names))

    def _hosts(self) -> tuple[HostRange, list[str]]:
        """The required numbers of hosts, and the candidates. Raises TooFewError."""
        plan = self._plans[0]
        candidates = list(plan.hosts.candidates) if plan.hosts else [node.name for node in plan.nodes]
        wanted = self._asked.request.hosts or HostRange(1, len(candidates))
        names = [name for name in candidates if name not in self._lost]
        if len(names) < wanted.min_hosts:
            remain = f"{counted(len(names), 'host')} of {len(candidates)} remain, and {wanted.min_hosts} are needed"
            lost = ", ".join(f"{name} was lost in {job}" for name, job in self._lost.items())
            raise TooFewError(f"{remain}: {lost}", "--rejoin takes a host in again once it answers")
        return HostRange(wanted.min_hosts, max(wanted.min_hosts, min(wanted.max_hosts, len(names)))), names

    def _newest(self, names: Sequence[str]) -> dict[str, KeptCheckpoint]:
        """The newest of all attempts, by host; {} if a script resumes by itself."""
        found = dict[str, KeptCheckpoint]()
        for plan in reversed(self._plans if self._asked.request.training else ()):
            nodes = [self._asked.cluster.node(node.name) for node in plan.nodes if node.name in names]
            looked = self._connections.each(nodes, partial(kept_by, plan), deadline_s=launch.ASK_S)
            for node, kept in values(looked).items():
                if kept and (node not in found or kept.updates > found[node].updates):
                    found[node] = kept
        most = max((kept.updates for kept in found.values()), default=0)
        return {node: kept for node, kept in found.items() if kept.updates == most}


def _going_on(request: RunRequest, kept: KeptCheckpoint) -> RunRequest:
    assert request.training  # noqa: S101 - it has written this checkpoint
    settings = replace(request.training, resume=kept.folder)
    return replace(request, settings=settings, chosen={**request.chosen, "resume": kept.folder})


def _refuse_without(holder: str | None, names: Sequence[str]) -> None:
    """holder: of the checkpoint that the first attempt resumed from; None if the user gave its path."""
    if holder and holder not in names:
        raise OrchError(f"the checkpoint that it goes on from was lost with {holder}", "--rejoin waits for that host")


def _is_there(record: Mapping[str, Any]) -> bool:
    return bool(record.get("alive") or record.get("left") or record.get("leftovers"))
