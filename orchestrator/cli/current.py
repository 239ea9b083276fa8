"""Which clusters are remembered, and which one a command is about: `clusters`, `use`."""

from __future__ import annotations

import click

from orchestrator.cli.common import json_option, open_controller
from orchestrator.cli.complete import cluster_names


@click.command()
@json_option
def clusters(as_json: bool) -> None:
    """List the remembered clusters; `*` marks the current one.

    \b
    orch clusters
    orch clusters --json | jq -r .current.name
    """
    from orchestrator.views import console, documents, tables

    with open_controller() as controller:
        current = controller.store.current()
        rows = controller.store.listed_clusters()
    if as_json:
        return console.print_json(documents.clusters_json(current, rows))
    columns = ("", "cluster", "hosts", "master", "jobs running", "file")
    marks = ["*" if current and row.name == current.name else "" for row in rows]
    cells = [
        (mark, row.name, str(len(row.nodes)), row.master or "", str(len(row.running)), row.file or "")
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
        if row.error:
            console.warn(row.error)
    return None


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
