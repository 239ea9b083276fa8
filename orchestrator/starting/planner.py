"""The plan of a job with given hosts (`Planner`), and the choice of hosts by `--hosts` (`HostChooser`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.clusters import Clusters, now_utc
from orchestrator.errors import HostError, HostsError, UnlikeError, UsageError
from orchestrator.hosts.cluster import Cluster
from orchestrator.paths import RUNS
from orchestrator.planning import naming
from orchestrator.planning.build import Draft, build_plan
from orchestrator.planning.job_spec import HostRange
from orchestrator.planning.launch_plan import CodeFolder, Faster, LaunchPlan
from orchestrator.planning.nccl import choose_carrier
from orchestrator.planning.placement import (
    Worth,
    check_range,
    choice_notes,
    choice_of,
    homes_of,
    notes_on,
    place,
    ranked,
    those_there,
)
from orchestrator.planning.profiles import Profiles, kinds_of, split_batch_of, split_equally
from orchestrator.planning.request import RunRequest
from orchestrator.store import Store

if TYPE_CHECKING:  # slow to load, and a script without a profile has no forecast
    from orchestrator.forecast.inputs import ForecastInputs


class Planner:
    def __init__(self, store: Store, clusters: Clusters) -> None:
        self._store, self._clusters = store, clusters

    def plan(
        self, cluster: Cluster, request: RunRequest, code: CodeFolder, only: Sequence[str], *, least: int | None
    ) -> LaunchPlan:
        """Leaves out hosts that only slow the job down, if the user allows it. least: hosts to keep; None keeps all."""
        plan, better = self._plan_on(cluster, request, code, only)
        notes: tuple[str, ...] = ()
        while better and least and len(better.hosts) >= least and request.leaves_out:
            from orchestrator.forecast.what_if import left_out_words

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
        """The plan and all inputs of its forecast. out: a folder of collected runs; None: the default and all
        remembered ones. Raises UsageError if too little is known, HostsError for unusable hosts.
        """
        from orchestrator.forecast.inputs import inputs_of, with_rounds
        from orchestrator.forecast.links import COLLECTIVES, read_network

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
            except UsageError:  # if a speed is not measured
                split = split_equally(draft.training.batch, ranks)
            draft = draft.with_split(split)
        plan = build_plan(draft)
        network = read_network(out, plan) if out else read_network(RUNS, plan, self._store.runs_of(COLLECTIVES))
        view = inputs_of(plan, profiles, network, bandwidth_bps)
        return build_plan(with_rounds(draft, view)), view

    def worth(self, cluster: Cluster, request: RunRequest, code: CodeFolder, there: Sequence[str]) -> Worth:
        """By speed if known, else by memory."""
        from orchestrator.forecast.what_if import by_memory

        worth = self.speeds(cluster, request, code, there)
        return worth or by_memory(self._clusters.ready(cluster, there).election.candidates)

    def speeds(self, cluster: Cluster, request: RunRequest, code: CodeFolder, there: Sequence[str]) -> Worth | None:
        """Samples/s of each host by itself; None if a speed is unknown."""
        from orchestrator.forecast.what_if import by_speed

        with suppress(UsageError, UnlikeError):  # the chosen hosts may not cause this error
            draft, profiles, _ = self._drawn(cluster, request, code, there)
            return by_speed(build_plan(draft), profiles)
        return None

    def _plan_on(
        self, cluster: Cluster, request: RunRequest, code: CodeFolder, only: Sequence[str]
    ) -> tuple[LaunchPlan, Faster | None]:
        """Also returns a faster subset of these nodes, if there is one."""
        draft, profiles, not_kept = self._drawn(cluster, request, code, only)
        ranks = draft.placement.ranks
        if draft.training and draft.request.global_batch:
            split = split_batch_of(draft.training, ranks, profiles, not_kept)
        else:
            split = split_equally(request.batch, ranks)
        draft = draft.with_split(split)
        if request.kind != "experiment" and not draft.training:
            return build_plan(draft), None
        from orchestrator.forecast.links import COLLECTIVES
        from orchestrator.forecast.what_if import predicted_plan

        return predicted_plan(draft, profiles, self._store.runs_of(COLLECTIVES))

    def _drawn(
        self, cluster: Cluster, request: RunRequest, code: CodeFolder, only: Sequence[str]
    ) -> tuple[Draft, Profiles, Profiles]:
        """Returns the draft, the profiles of its ranks, and invalid profiles."""
        ready = self._clusters.ready(cluster, only)
        homes = homes_of(ready.nodes, ready.facts)
        request = replace(request, notes=(*notes_on(request, str(Path.home()), homes), *request.notes))
        placement = place(ready.nodes, ready.facts, ready.election, request)
        draft = Draft(
            cluster=cluster.name,
            job=request.job or naming.job_id(request.spec.name or request.name, datetime.now(timezone.utc)),
            created=now_utc(),
            code=code,
            request=request,
            placement=placement,
            carrier=choose_carrier(placement.nodes, request),
        )
        kinds = kinds_of(build_plan(draft), ready.facts)
        known, not_kept = (self._store.profiles(kinds, cluster.name, valid=valid) for valid in (True, False))
        return draft.with_own_batch(known), known, not_kept


class HostChooser:
    def __init__(self, planner: Planner, clusters: Clusters) -> None:
        self._planner, self._clusters = planner, clusters

    def plan(self, cluster: Cluster, request: RunRequest, code: CodeFolder, only: Sequence[str] = ()) -> LaunchPlan:
        """only: nodes; () means all that are not released. With `request.hosts`, hosts that do not answer are left out.
        Raises HostsError for unusable hosts, TooFewError if too few remain.
        """
        if request.hosts is None:
            return self._planner.plan(cluster, request, code, only, least=None if only else 1)
        return self.plan_on_present(cluster, request, code, only, self.away(cluster, request, only))

    def away(self, cluster: Cluster, request: RunRequest, only: Sequence[str]) -> dict[str, HostError]:
        """Nodes that cannot take part now. Raises UsageError if `request.hosts` exceeds the cluster."""
        check_range(_wanted(cluster, request), _names(cluster, only))
        return self._clusters.away(cluster, only)

    def plan_on_present(
        self,
        cluster: Cluster,
        request: RunRequest,
        code: CodeFolder,
        only: Sequence[str],
        away: Mapping[str, HostError],
    ) -> LaunchPlan:
        """The best nodes that are not away, as many as `request.hosts` allows. Raises UsageError, TooFewError."""
        wanted, candidates = _wanted(cluster, request), _names(cluster, only)
        there = those_there(wanted, candidates, away)
        pin = cluster.master_pin or next((node.name for node in cluster.nodes if node.master), None)
        if pin and pin in away and request.training and request.training.resume:  # it holds the checkpoint
            raise HostsError([away[pin]])
        worth = self._planner.worth(cluster, request, code, there) if len(there) > wanted.max_hosts else None
        best = ranked(there, worth, pin) if worth else there
        taken = [name for name in there if name in best[: wanted.max_hosts]]
        least = None if only else wanted.min_hosts
        others = choice_of(wanted, away, best[wanted.max_hosts :], candidates)
        with _naming_the_others(choice_notes(others, away, worth)):
            plan = self._planner.plan(cluster, request, code, taken, least=least)
        members = {node.name for node in plan.nodes}
        choice = choice_of(wanted, away, [name for name in best if name not in members], candidates)
        notes = (*choice_notes(choice, away, worth), *plan.notes)
        return plan.model_copy(update={"hosts": choice, "notes": notes})


@contextmanager
def _naming_the_others(notes: Sequence[str]) -> Iterator[None]:
    """Adds these notes to an error: the user's settings may name hosts that were not chosen."""
    try:
        yield
    except (UsageError, UnlikeError) as error:
        error.message = "\n".join([error.message, *notes])
        raise


def _wanted(cluster: Cluster, request: RunRequest) -> HostRange:
    return request.hosts or HostRange(1, len(cluster.nodes))


def _names(cluster: Cluster, only: Sequence[str]) -> list[str]:
    return [node.name for node in cluster.chosen(only)]
