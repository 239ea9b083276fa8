"""Which hosts a job takes, by `--hosts`, and its plan with these.

plan = choice.plan(cluster, request, code, only)                    all that were named, or as many as `request.hosts`
away = choice.away(cluster, request, only)                          who cannot take part now, and why
plan = choice.of_those_there(cluster, request, code, only, away)    the best of all others
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from orchestrator.clusters import Clusters
from orchestrator.errors import HostError, HostsError, UnlikeError, UsageError
from orchestrator.hosts.cluster import Cluster
from orchestrator.planning.host_choice import (
    HostRange,
    check_range,
    choice_notes,
    choice_of,
    ranked,
    those_there,
)
from orchestrator.planning.launch_plan import CodeFolder, LaunchPlan
from orchestrator.planning.request import RunRequest
from orchestrator.starting.planner import Planner


class HostChooser:
    def __init__(self, planner: Planner, clusters: Clusters) -> None:
        self._planner, self._clusters = planner, clusters

    def plan(self, cluster: Cluster, request: RunRequest, code: CodeFolder, only: Sequence[str] = ()) -> LaunchPlan:
        """only: the nodes to take; none means all that are not released. Raises HostsError for unusable ones.

        With `request.hosts` those that give no answer now are left out, as long as enough remain; else TooFewError.
        """
        if request.hosts is None:
            return self._planner.plan(cluster, request, code, only, least=None if only else 1)
        return self.of_those_there(cluster, request, code, only, self.away(cluster, request, only))

    def away(self, cluster: Cluster, request: RunRequest, only: Sequence[str]) -> dict[str, HostError]:
        """Which nodes `request.hosts` has to do without. Raises UsageError where it wants more than there are."""
        check_range(_wanted(cluster, request), _names(cluster, only))
        return self._clusters.away(cluster, only)

    def of_those_there(
        self,
        cluster: Cluster,
        request: RunRequest,
        code: CodeFolder,
        only: Sequence[str],
        away: Mapping[str, HostError],
    ) -> LaunchPlan:
        """With as many as `request.hosts` allows of the nodes that are not away. Raises UsageError, TooFewError."""
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
    """Where a job cannot be planned with the hosts that were taken, why it is these: the person may have named others
    in its settings. notes: as of `choice_notes`.
    """
    try:
        yield
    except (UsageError, UnlikeError) as error:
        error.message = "\n".join([error.message, *notes])
        raise


def _wanted(cluster: Cluster, request: RunRequest) -> HostRange:
    return request.hosts or HostRange(1, len(cluster.nodes))


def _names(cluster: Cluster, only: Sequence[str]) -> list[str]:
    return [node.name for node in cluster.chosen(only)]
