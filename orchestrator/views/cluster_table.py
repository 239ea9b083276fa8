"""The table of a cluster's hosts: `up`, `status`, `node`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from orchestrator.errors import HostError
from orchestrator.hosts.cluster import Cluster
from orchestrator.views import console
from orchestrator.views.documents import cluster_json
from orchestrator.views.figures import age
from orchestrator.views.tables import table


def print_cluster(cluster: Cluster) -> None:
    _print_nodes(cluster, cluster_json(cluster)["nodes"], "added")


def print_status(cluster: Cluster, silent: Mapping[str, HostError] | None) -> None:
    """silent: the nodes that do not answer at this moment; None where nobody looked."""
    nodes = cluster_json(cluster, silent)["nodes"]
    _print_nodes(cluster, [{**node, "probed": age(node["probed"])} for node in nodes], "probed")
    known = {name: problem.as_error(name) for name, problem in cluster.problems.items()}
    console.fail_each({**known, **(silent or {})}.values())


def _print_nodes(cluster: Cluster, nodes: Sequence[Mapping[str, Any]], when: str) -> None:
    """when: the key of the time that comes last."""
    columns = ("name", "IP", "id", "note", "GPU", "bandwidth", "image", "torch", "venv", "status", when)
    rows = [[str(node["address" if column == "IP" else column.lower()] or "") for column in columns] for node in nodes]
    filled = [index for index in range(len(columns)) if any(row[index] for row in rows)]  # a narrow screen has no room
    shown = [[row[index] for index in filled] for row in rows]
    drop = ("added", "venv", "note", "image", "id", "bandwidth")
    console.out.print(table(f"cluster {cluster.name}", [columns[index] for index in filled], shown, drop=drop))
    if cluster.master:
        console.out.print(Text.assemble("master: ", console.plain(cluster.master_reason, "bold")))
