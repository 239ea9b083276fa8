"""What a remembered cluster takes from its inventory file again: defaults for further nodes, and values that may be
secret, of which orch keeps none.

    node, words = node_with_defaults(cluster, {"name": "a16", "host": "192.168.1.52"})
    nodes = with_secrets(cluster, cluster.active())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import InventoryError, UsageError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.inventory import Inventory, Node
from orchestrator.hosts.inventory_file import load_inventory, node_from_keys
from orchestrator.hosts.masking import MASK
from orchestrator.hosts.yamlfile import resolve_scalar


def node_with_defaults(cluster: Cluster, keys: Mapping[str, Any]) -> tuple[Node, str]:
    """A node that the file does not have, with the file's defaults as they are now, else as they were at the last `up`;
    and in words what it has from them. Raises InventoryError for wrong keys.
    """
    defaults, source = cluster.defaults, f"the last `orch up` ({cluster.file} cannot be used now)"
    with suppress(InventoryError):
        inventory = load_inventory(Path(cluster.file))
        if inventory.cluster == cluster.name:
            defaults, source = inventory.defaults, cluster.file
    inherited = [key for key in defaults if key not in keys]
    words = f"{', '.join(inherited)}: from the defaults of {source}" if inherited else ""
    return node_from_keys(keys, "node add", defaults), words


@dataclass(frozen=True)
class NewNode:
    """One that a person adds. inherited: what it has from the defaults, in words. alone: an inventory of it, for who
    looks what it would run here.
    """

    node: Node
    inherited: str
    alone: Inventory


def keys_of_new_node(name: str, pairs: Mapping[str, str]) -> dict[str, Any]:
    """pairs: keys of an inventory's node as a person types them. Raises InventoryError for wrong ones, UsageError for
    `prepare`.
    """
    keys = {"name": name, **{key: resolve_scalar(value) for key, value in pairs.items()}}
    if node_from_keys({"host": "any", **keys}, "node add").prepare:
        raise UsageError("orch keeps no `prepare` of its own", "write the node into the inventory file")
    return keys


def new_node(cluster: Cluster, keys: Mapping[str, Any]) -> NewNode:
    """keys: see keys_of_new_node. Raises InventoryError where they and the cluster's defaults make no node."""
    node, inherited = node_with_defaults(cluster, keys)
    return NewNode(node, inherited, Inventory(cluster=cluster.name, nodes=(node,), file=cluster.file))


def extra_again(cluster: Cluster, inventory: Inventory) -> tuple[Node, ...]:
    """The cluster's nodes that the file does not have, with the file's defaults of now."""
    return tuple(
        node_from_keys(
            cluster.extra_keys[node.name], f"node {node.name}, added to {inventory.file}", inventory.defaults
        )
        if node.name in cluster.extra_keys
        else node
        for node in cluster.extra
    )


def with_secrets(cluster: Cluster, nodes: Sequence[Node]) -> list[Node]:
    """These nodes with the values of `env` that may be secrets and `prepare`: we keep none, they are read from the
    inventory again.

    Raises UsageError where it no longer holds them.
    """
    if not any(MASK in (*node.env.values(), node.prepare) for node in nodes):
        return list(nodes)
    again = f"orch keeps no values of `env` and no `prepare`; `orch up {cluster.file}` again"
    try:
        inventory = load_inventory(Path(cluster.file))
    except InventoryError as error:
        raise UsageError(str(error.mistakes[0]), again) from error
    nodes_now = {node.name: node for node in (*extra_again(cluster, inventory), *inventory.nodes)}
    for node in nodes:
        now = nodes_now.get(node.name)
        if (now.env.keys() if now else set()) != node.env.keys():
            raise UsageError(
                f"{cluster.file}: the `env` of node {node.name} is not the one of the last `orch up`", again
            )
        if bool(now and now.prepare) != bool(node.prepare):
            raise UsageError(
                f"{cluster.file}: the `prepare` of node {node.name} is not the one of the last `orch up`", again
            )
    secret = {name: {"env": node.env, "prepare": node.prepare} for name, node in nodes_now.items()}
    return [node.model_copy(update=secret.get(node.name, {})) for node in nodes]
