"""Which clusters are remembered, and which one a command is about: `clusters`, `use`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import json_option, open_controller
from orchestrator.cli.complete import cluster_names
from orchestrator.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.jobs.record import JobRecord
    from orchestrator.store import Store


@click.command()
@json_option
def clusters(as_json: bool) -> None:
    """List the remembered clusters; `*` marks the current one.

    \b
    orch clusters
    orch clusters --json | jq -r .current.name
    """
    from dataclasses import asdict

    from orchestrator.jobs.record import ENDED
    from orchestrator.views import console, tables

    with open_controller() as controller:
        current = controller.store.current()
        running = [job for job in controller.store.jobs() if job.state not in ENDED]
        rows = [_row(controller.store, name, running) for name in controller.store.cluster_names()]
    if as_json:
        document = {"schema": 1, "current": asdict(current) if current else None, "clusters": rows}
        return console.print_json(document)
    columns = ("", "cluster", "hosts", "master", "jobs running", "file")
    marks = ["*" if current and row["name"] == current.name else "" for row in rows]
    cells = [
        (mark, row["name"], str(len(row["nodes"])), row["master"] or "", str(len(row["running"])), row["file"] or "")
        for mark, row in zip(marks, rows, strict=True)
    ]
    if cells:
        tables.print_table(columns, cells, right_from=99, drop=("file", "master", "jobs running"))
    if current:
        unknown = "" if any(marks) else ", which is not remembered"
        console.say(f"current: {current.name}{unknown} (by {current.by})")
    else:
        console.say("no cluster is the current one: `orch up INVENTORY`, or `orch use NAME`")
    for row in rows:
        if row["error"]:
            console.warn(row["error"])
    return None


def _row(store: Store, name: str, running: Sequence[JobRecord]) -> dict[str, Any]:
    """running: all jobs that had not ended when they were last asked after."""
    own = [job.id for job in running if job.cluster == name]
    row: dict[str, Any] = {"name": name, "nodes": [], "master": None, "file": None, "running": own, "error": None}
    try:
        cluster = store.cluster(name)
    except StateError as error:
        return row | {"error": str(error)}
    return row | {"nodes": [node.name for node in cluster.nodes], "master": cluster.master, "file": cluster.file}


@click.command()
@click.argument("name", metavar="CLUSTER", shell_complete=cluster_names)
def use(name: str) -> None:
    """Make a remembered cluster the current one, for all terminals; asks no host.

    For one terminal only, set ORCH_CLUSTER there: it overrides `orch use` and `orch up`.

    \b
    orch use rack
    export ORCH_CLUSTER=rack
    """
    from orchestrator.views import console

    with open_controller() as controller:
        cluster = controller.store.use(name)
        terminals = controller.store.terminals()
    console.put(f"{cluster.name} is the current cluster: {', '.join(node.name for node in cluster.nodes)}")
    if terminals and terminals.name != cluster.name:
        console.warn(f"{terminals.by}={terminals.name} still chooses in this terminal: unset {terminals.by}")
