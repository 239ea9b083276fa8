"""The plan of a job with exactly these hosts: a host that cannot take part is an error here.

plan = planner.plan(cluster, request, code, ["a2000", "v100"], least=None)
plan, inputs = planner.outlook(cluster, request, code)              and what is known of its speed

Which hosts these are, `choice` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from orchestrator.clusters import Clusters, now_utc
from orchestrator.errors import UnlikeError, UsageError
from orchestrator.forecast.best_hosts import by_memory, by_speed
from orchestrator.forecast.cluster_links import COLLECTIVES, read_network
from orchestrator.forecast.inputs import ForecastInputs, inputs_of
from orchestrator.forecast.predicted_plan import left_out_words, predicted_plan
from orchestrator.forecast.rounds import with_rounds
from orchestrator.hosts.cluster import Cluster
from orchestrator.paths import RUNS
from orchestrator.planning import naming
from orchestrator.planning.build import build_plan
from orchestrator.planning.draft import Draft
from orchestrator.planning.homes import homes_of, notes_on
from orchestrator.planning.host_choice import Worth
from orchestrator.planning.launch_plan import CodeFolder, Faster, LaunchPlan
from orchestrator.planning.nccl import choose_carrier
from orchestrator.planning.placement import place
from orchestrator.planning.profiles import Profiles, kinds_of
from orchestrator.planning.request import RunRequest
from orchestrator.planning.split import split_batch_of, split_equally
from orchestrator.store import Store


class Planner:
    def __init__(self, store: Store, clusters: Clusters) -> None:
        self._store, self._clusters = store, clusters

    def plan(
        self, cluster: Cluster, request: RunRequest, code: CodeFolder, only: Sequence[str], *, least: int | None
    ) -> LaunchPlan:
        """Without hosts that only slow the job down, where the person leaves that to us. least: so many stay; None
        keeps all.
        """
        plan, better = self._plan_on(cluster, request, code, only)
        notes: tuple[str, ...] = ()
        while better and least and len(better.hosts) >= least and request.leaves_out:
            notes += (left_out_words(plan, better, request),)
            plan, better = self._plan_on(cluster, request, code, better.hosts)
        return plan.model_copy(update={"notes": (*plan.notes, *notes)})

    def outlook(
        self,
        cluster: Cluster,
        request: RunRequest,
        code: CodeFolder,
        only: Sequence[str] = (),
        *,
        out: Path | None = None,
        bandwidth_bps: float | None = None,
    ) -> tuple[LaunchPlan, ForecastInputs]:
        """What would run, and what is known of its speed. out: a folder of collected runs; None means the usual one,
        and all others that are remembered. Raises UsageError where too little is known, HostsError for hosts that
        cannot take part.
        """
        draft, profiles, _ = self._drawn(cluster, request, code, only)
        if draft.request.kind != "experiment" and not draft.request.batch:
            raise UsageError(
                f"how many samples an update of {request.name} has is unknown: it has not been profiled as it is now",
                "`orch profile -- SCRIPT [ARGS]`, or --set batch=",
            )
        if draft.training and draft.request.global_batch:
            ranks = draft.placement.ranks
            try:
                split = split_batch_of(draft.training, ranks, profiles)
            except UsageError:  # by speeds that nobody has measured
                split = split_equally(draft.training.batch, ranks)
            draft = draft.with_split(split)
        plan = build_plan(draft)
        network = read_network(out, plan) if out else read_network(RUNS, plan, self._store.runs_of(COLLECTIVES))
        view = inputs_of(plan, profiles, network, bandwidth_bps)
        return build_plan(with_rounds(draft, view)), view

    def worth(self, cluster: Cluster, request: RunRequest, code: CodeFolder, there: Sequence[str]) -> Worth:
        """What each of these hosts is worth to the job."""
        worth = None
        with suppress(UsageError, UnlikeError):  # which may not hold for those that are taken
            draft, profiles, _ = self._drawn(cluster, request, code, there)
            worth = by_speed(build_plan(draft), profiles)
        return worth or by_memory(self._clusters.ready(cluster, there).election.candidates)

    def _plan_on(
        self, cluster: Cluster, request: RunRequest, code: CodeFolder, only: Sequence[str]
    ) -> tuple[LaunchPlan, Faster | None]:
        """The plan with these nodes, and whether fewer of them would be faster."""
        draft, profiles, not_kept = self._drawn(cluster, request, code, only)
        ranks = draft.placement.ranks
        if draft.training and draft.request.global_batch:
            split = split_batch_of(draft.training, ranks, profiles, not_kept)
        else:
            split = split_equally(request.batch, ranks)
        return predicted_plan(draft.with_split(split), profiles, self._store.runs_of(COLLECTIVES))

    def _drawn(
        self, cluster: Cluster, request: RunRequest, code: CodeFolder, only: Sequence[str]
    ) -> tuple[Draft, Profiles, Profiles]:
        """Who does what, what is known of the ranks' speeds, and profiles that count for nothing."""
        ready = self._clusters.ready(cluster, only)
        homes = homes_of(ready.nodes, ready.facts)
        request = replace(request, notes=(*notes_on(request, str(Path.home()), homes), *request.notes))
        placement = place(ready.nodes, ready.facts, ready.election, request)
        draft = Draft(
            cluster=cluster.name,
            job=naming.job_id(request.spec.name or request.name, datetime.now(timezone.utc)),
            created=now_utc(),
            code=code,
            request=request,
            placement=placement,
            carrier=choose_carrier(placement.nodes, request),
        )
        kinds = kinds_of(build_plan(draft), ready.facts)
        known, not_kept = (self._store.profiles(kinds, cluster.name, valid=valid) for valid in (True, False))
        return draft.with_own_batch(known), known, not_kept
