"""Commands about a cluster: `up`, `status`, `master`, `trust`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.common import accept_option, agrees, busy, cluster_option, json_option, open_controller
from orchestrator.cli.complete import node_names
from orchestrator.errors import UsageError
from orchestrator.units import counted

if TYPE_CHECKING:
    from orchestrator.clusters import Up
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.hosts.facts import NodeFacts
    from orchestrator.hosts.inventory import Node
    from orchestrator.paths import Home


allow_local_option = click.option(
    "--allow-local", is_flag=True, help="Do not ask about commands that the file runs on this machine."
)


@click.command()
@click.argument("inventory", type=click.Path(path_type=Path))
@accept_option
@allow_local_option
@json_option
def up(inventory: Path, accept_new_host_keys: bool, allow_local: bool, as_json: bool) -> None:
    """Connect to every host, probe it, elect the master and say why.

    The cluster becomes the current one. The exit code is 3 if a host cannot be used, or if hosts are too different to
    train together; the others still can. If the file runs commands on this machine (`transport: local`), they are
    shown and you are asked about them once, and again whenever one of them changes.

    \b
    orch up inventory/a2000_v100.yaml
    orch up inventory/lab_pair.yaml --accept-new-host-keys
    """
    from orchestrator.hosts.inventory_file import load_inventory
    from orchestrator.views import console

    loaded = load_inventory(inventory)
    with open_controller(accept_new_host_keys) as controller:
        nodes = controller.clusters.nodes_of(loaded)
        ask_about_local(controller.store.home, loaded.file, nodes, allow_local)
        with busy(f"probing {counted(len(loaded.nodes), 'host')}"):
            probed = controller.clusters.up(loaded)
        terminals = controller.store.terminals()
    if terminals and terminals.name != loaded.cluster:
        console.warn(f"{terminals.by}={terminals.name} still chooses in this terminal: unset {terminals.by}")
    show_up(probed, as_json)


def ask_about_local(home: Home, source: str, nodes: Sequence[Node], yes: bool) -> None:
    """source: where the nodes come from. Raises UsageError if its person does not want it, or cannot be asked."""
    from orchestrator.hosts.consent import allow, not_allowed
    from orchestrator.views import console

    commands = not_allowed(home, nodes)
    if not commands:
        return
    console.say(f"{source} would have this machine run, as you:")
    for command in commands:
        console.say(f"  {command}")
    if not yes and not agrees("Do you trust it?"):
        raise UsageError(f"{source}: nothing of it was run", "read it, then `orch up --allow-local` with it")
    allow(home, commands)


@click.command()
@click.option("--no-look", is_flag=True, help="Contact no host; show what was last known.")
@cluster_option
@json_option
def status(no_look: bool, cluster: str | None, as_json: bool) -> None:
    """Show the cluster's hosts, which of them answer now, and its latest jobs.

    All hosts are contacted at the same time; one that is off costs 2 s. The facts in the table are from the last probe.
    Other people's processes on the GPUs are looked up now and named.

    \b
    orch status
    orch status --no-look
    orch status --json | jq .cluster.master
    """
    from orchestrator.views import cluster_table, console, documents, job_table

    with open_controller() as controller:
        known = controller.store.cluster(cluster)
        silent = on_gpus = None
        if not no_look:
            with busy(f"looking at {counted(len(known.nodes), 'host')}"):
                silent = controller.connections.silent(known.nodes)
                on_gpus = controller.clusters.on_gpus(known, without=silent)
        listed = controller.jobs.all(known.name, silent, why=not no_look)
        jobs = listed.records[:10]
    if as_json:
        cluster_now = documents.cluster_json(known, silent, on_gpus)
        console.print_json(documents.status_json(cluster_now, jobs, listed.unheard))
        return job_table.warn_unheard(listed.unheard)
    cluster_table.print_status(known, silent)
    if jobs:
        job_table.print_jobs(jobs)
    _warn_of_others(known, on_gpus or {}, [job.id for job in listed.records])
    job_table.warn_stalls(jobs)
    job_table.warn_unheard(listed.unheard)
    return None


def _warn_of_others(cluster: Cluster, on_gpus: Mapping[str, NodeFacts], jobs: Sequence[str]) -> None:
    """Warns of processes on the GPUs that belong to no job of this cluster."""
    from orchestrator.hosts.checks import gpu_warnings
    from orchestrator.hosts.occupied import without_jobs
    from orchestrator.views import console

    for name, facts in on_gpus.items():
        for line in gpu_warnings(cluster.node(name), without_jobs(facts, jobs)):
            console.warn(line)


@click.command()
@click.argument("name", metavar="NODE", required=False, shell_complete=node_names)
@click.option("--elect", is_flag=True, help="Remove the pin; the election chooses again.")
@cluster_option
def master(name: str | None, elect: bool, cluster: str | None) -> None:
    """Pin the master of the current cluster; the pin overrides the election.

    \b
    orch master v100
    orch master --elect
    """
    from orchestrator.views import cluster_table

    if bool(name) == elect:
        what = f"{name} and --elect at once" if name else "neither a node nor --elect was given"
        raise UsageError(what, "`orch master NODE`, or `orch master --elect`")
    with open_controller() as controller:
        cluster_table.print_cluster(controller.clusters.pin_master(controller.store.cluster(cluster), name))


@click.command()
@click.argument("name", metavar="NODE", shell_complete=node_names)
@click.option(
    "--inventory", type=click.Path(path_type=Path), help="Read the node from this file, before the first `orch up`."
)
@click.option(
    "--yes", is_flag=True, help="Record without asking, after you have compared the fingerprint by other means."
)
@cluster_option
def trust(name: str, inventory: Path | None, yes: bool, cluster: str | None) -> None:
    """Show a host's key and record it once you have compared its fingerprint.

    Compare with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the host's own console.

    \b
    orch trust v100
    orch trust v100 --inventory inventory/a2000_v100.yaml
    """
    from orchestrator.hosts.connections import target_of
    from orchestrator.hosts.inventory_file import load_inventory
    from orchestrator.transport import ssh
    from orchestrator.transport.hostkeys import HostKeys
    from orchestrator.views import console

    with open_controller() as controller:
        source = load_inventory(inventory) if inventory else controller.store.cluster(cluster)
        host_keys = HostKeys.default(controller.store.home)
        offered = None
        while offered is None or offered.peer.jump:  # the jump hosts on the way come first
            offered = ssh.fetch_host_key(target_of(source.node(name)), host_keys=host_keys)
            console.say(f"{offered.peer} shows the {offered.key.get_name()} key {offered.fingerprint}")
            if not yes and not click.confirm("Is this the fingerprint of that host?", default=False, err=True):
                raise UsageError(f"{name}: its key was not recorded", "compare it on the host's own console")
            host_keys.check(offered.peer, offered.key, accept_new=True)
        console.say(f"recorded in {controller.store.home.known_hosts}")


def show_up(probed: Up, as_json: bool) -> None:
    from orchestrator.views import cluster_table, console, documents

    if as_json:
        shown = documents.cluster_json(probed.cluster)
        console.print_json({**shown, "findings": documents.findings_json(probed.findings)})
    else:
        cluster_table.print_cluster(probed.cluster)
    for warning in probed.warnings:
        console.warn(warning)
    console.fail_each([*probed.problems.values(), *([probed.unlike] if probed.unlike else [])])
    if probed.problems or probed.unlike:
        sys.exit(3)
