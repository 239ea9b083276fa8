"""What jobs wrote beside their logs, as their hosts list it, and what of it no run folder here has.

outputs(plan, hosts)                                Outputs(found={"a": OutputListing(...)}, errors={})
unpulled(jobs, connections, cluster)                what `orch down` would take with it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.errors import HostError, OrchError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.connections import Connections
from orchestrator.jobs.copies import is_removed
from orchestrator.jobs.listing import Output, OutputListing, list_outputs, nowhere, without_copies
from orchestrator.jobs.remembered import RememberedJobs
from orchestrator.owner import read_owner
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors_by_node, values


@dataclass(frozen=True)
class Outputs:
    """By node, what a job wrote beside its logs; and the hosts that could not be asked."""

    found: Mapping[str, OutputListing]
    errors: Mapping[str, HostError]


@dataclass(frozen=True)
class Unpulled:
    """What would be lost with the jobs' files on their hosts."""

    files: Mapping[str, Sequence[tuple[str, Output]]]
    """By job: (node, file)."""
    errors: Mapping[str, HostError]
    """Hosts that could not be asked."""


def outputs(plan: LaunchPlan, hosts: Mapping[str, ConnectedHost]) -> Outputs:
    listed = list_outputs(hosts, {name: [plan.job] for name in hosts})
    by_node = {name: listings[plan.job] for name, listings in values(listed).items()}
    return Outputs(without_copies(plan, by_node), errors_by_node(listed))


def unpulled(jobs: RememberedJobs, connections: Connections, cluster: Cluster) -> Unpulled:
    """What the jobs that `down` would remove wrote and no remembered run folder has."""
    plans = _own_plans(jobs, cluster)
    asked = {
        node.name: [plan.job for plan in plans if node.name in {planned.name for planned in plan.nodes}]
        for node in cluster.nodes
    }
    opened = connections.open([cluster.node(name) for name, ids in asked.items() if ids])
    listed = list_outputs(values(opened), asked)
    files: dict[str, list[tuple[str, Output]]] = {}
    for plan in plans:
        found = {name: listings[plan.job] for name, listings in values(listed).items() if plan.job in listings}
        runs = [RunFolder(folder) for folder in jobs.run_folders(plan.job)]
        for name, listing in without_copies(plan, found).items():
            if lacking := nowhere(runs, name, listing.files):
                files.setdefault(plan.job, []).extend((name, output) for output in lacking)
    return Unpulled(files, {**errors_by_node(opened), **errors_by_node(listed)})


def _own_plans(jobs: RememberedJobs, cluster: Cluster) -> list[LaunchPlan]:
    """The plans of this home's jobs on the cluster whose hosts may still hold files."""
    plans, own = list[LaunchPlan](), read_owner(jobs.home)
    for record in jobs.jobs():
        with suppress(OrchError):  # one that is damaged
            plan = jobs.plan(record.id)
            if record.cluster == cluster.name and plan.owner == own and not is_removed(jobs, plan):
                plans.append(plan)
    return plans
