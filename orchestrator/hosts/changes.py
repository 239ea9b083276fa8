"""What commands change of a remembered cluster, asked for under the store's lock of the cluster as it is then. Pure.

store.change_cluster("rack", lambda known: without_node(known, "a2000"))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.hosts.cluster import Cluster, Venv
from orchestrator.hosts.inventory import Node


def with_known(of_file: Cluster, known: Cluster) -> Cluster:
    """of_file: the cluster as its file alone has it. What `orch node`, `orch master` and `orch setup` changed stays."""
    nodes = tuple(node for node in of_file.nodes if node.name not in known.removed)
    nodes += tuple(node for node in known.extra if node.name not in {n.name for n in nodes})
    own = {node.name: node.python for node in nodes}  # of the file as it is now
    kept = ("added", "probed", "released", "removed", "extra", "extra_keys", "master_pin")
    seen = {part: only(getattr(known, part), own) for part in ("facts", "problems")}
    cluster = of_file.model_copy(update={"nodes": nodes, **{name: getattr(known, name) for name in kept}, **seen})
    venvs = only(known.venvs, own)
    return cluster.with_venvs(
        {name: venv.model_copy(update={"base_python": own[name]}) for name, venv in venvs.items()}
    )


def with_node(cluster: Cluster, keys: Mapping[str, Any], node: Node) -> Cluster:
    """keys: those of `node` that it does not have from the defaults. Raises UsageError where it is there already."""
    if node.name in {other.name for other in cluster.nodes}:
        raise UsageError(f"{node.name} is already in cluster {cluster.name}", "choose another name")
    changed = {
        "nodes": (*cluster.nodes, node),
        "extra": (*cluster.extra, node),
        "extra_keys": {**cluster.extra_keys, node.name: dict(keys)},
        "removed": tuple(name for name in cluster.removed if name != node.name),
    }
    return cluster.model_copy(update=changed)


def without_node(cluster: Cluster, name: str) -> Cluster:
    """Raises UsageError where it is not there, or the last one."""
    node = cluster.node(name)
    if len(cluster.nodes) == 1:
        raise UsageError(f"{name} is the last node of cluster {cluster.name}", "`orch down` clears its host")
    update = {
        "nodes": tuple(other for other in cluster.nodes if other is not node),
        "extra": tuple(other for other in cluster.extra if other.name != name),
        "extra_keys": all_but(cluster.extra_keys, {name}),
        "removed": (*cluster.removed, name),
        "facts": all_but(cluster.facts, {name}),
        "problems": all_but(cluster.problems, {name}),
        "venvs": all_but(cluster.venvs, {name}),
        "master_pin": None if cluster.master_pin == name else cluster.master_pin,
    }
    return cluster.model_copy(update=update)


def released(cluster: Cluster, name: str, *, restore: bool) -> Cluster:
    """Given no job until it is restored. Raises UsageError where no other host is left for jobs."""
    cluster.node(name)
    others = tuple(other for other in cluster.released if other != name)
    if not restore and not {node.name for node in cluster.active()} - {name} - cluster.problems.keys():
        raise UsageError(f"{name} is the only usable host of cluster {cluster.name}", "restore another one first")
    return cluster.model_copy(update={"released": others if restore else (*others, name)})


def with_made(cluster: Cluster, venvs: Mapping[str, Venv | None]) -> Cluster:
    """With these environments, of those of its nodes that are there; None takes one away."""
    there = {node.name: venvs[node.name] for node in cluster.nodes if node.name in venvs}
    kept = {**all_but(cluster.venvs, set(there)), **{name: venv for name, venv in there.items() if venv}}
    return cluster.with_venvs(kept)


def all_but(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def only(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}
