"""What a remembered cluster takes from its inventory file again: defaults for further nodes, and values that may be
secret, of which orch keeps none.

    node, words = node_with_defaults(cluster, {"name": "a16", "host": "192.168.1.52"})
    nodes = with_secrets(home, cluster, cluster.active())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.errors import InventoryError, UsageError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.consent import not_allowed
from orchestrator.hosts.inventory import Inventory, Node
from orchestrator.hosts.inventory_file import load_inventory, node_from_keys
from orchestrator.hosts.masking import MASK
from orchestrator.hosts.yamlfile import resolve_scalar
from orchestrator.paths import Home


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


def keys_of_new_node(name: str, pairs: Mapping[str, str]) -> dict[str, Any]:
    """pairs: keys of an inventory's node as a person types them. Raises InventoryError for wrong ones, UsageError for
    `prepare`.
    """
    keys = {"name": name, **{key: resolve_scalar(value) for key, value in pairs.items()}}
    if node_from_keys({"host": "any", **keys}, "node add").prepare:
        raise UsageError("orch keeps no `prepare` of its own", "write the node into the inventory file")
    return keys


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


def with_secrets(home: Home, cluster: Cluster, nodes: Sequence[Node]) -> list[Node]:
    """These nodes with `prepare` and the values of `env` that may be secrets: we keep none, they are read from the
    inventory again.

    Raises UsageError if the inventory no longer holds them, or if it now runs on this machine what nobody allowed.
    """
    masked = any(MASK in (*node.env.values(), node.prepare) for node in nodes)
    if not masked and all(node.transport != "local" for node in nodes):
        return list(nodes)
    again = f"orch keeps no values of `env` and no `prepare`; `orch up {cluster.file}` again"
    try:
        inventory = load_inventory(Path(cluster.file))
    except InventoryError as error:
        if not masked:
            return list(nodes)
        raise UsageError(str(error.mistakes[0]), again) from error
    nodes_now = {node.name: node for node in (*extra_again(cluster, inventory), *inventory.nodes)}
    now = [nodes_now[node.name] for node in nodes if node.name in nodes_now]
    if commands := not_allowed(home, now):
        keys = "; ".join(f"{command.node}: {command.key}" for command in commands)  # a value may hold a secret
        raise UsageError(
            f"{cluster.file}: you have not allowed what it now runs on this machine: {keys}",
            f"read it, then `orch up {cluster.file}`, which asks you about it",
        )
    return [_with_secrets(cluster, node, nodes_now.get(node.name), again) for node in nodes] if masked else list(nodes)


def _with_secrets(cluster: Cluster, node: Node, now: Node | None, again: str) -> Node:
    """Raises UsageError."""
    known = now.env.keys() if now else set()
    for key, same in (("env", known == node.env.keys()), ("prepare", bool(now and now.prepare) == bool(node.prepare))):
        if not same:
            raise UsageError(
                f"{cluster.file}: the `{key}` of node {node.name} is not the one of the last `orch up`", again
            )
    return node.model_copy(update={"env": now.env, "prepare": now.prepare} if now else {})
