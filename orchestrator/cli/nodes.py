"""Commands about the nodes of a cluster: `node add`, `remove`, `release`, `restore`."""

from __future__ import annotations

import click

from orchestrator.cli.clusters import allow_local_option, ask_about_local, show_up
from orchestrator.cli.common import accept_option, busy, cluster_option, json_option, open_controller
from orchestrator.cli.complete import node_names


@click.group()
def node() -> None:
    """Add, remove, release or restore nodes of the current cluster; your inventory file is never changed.

    \b
    orch node add a16 host=192.168.1.52 gpu=A16 bandwidth=2.5Gbps
    orch node release a2000
    """


@node.command("add")
@click.argument("name")
@click.argument("keys", nargs=-1, metavar="KEY=VALUE...")
@accept_option
@allow_local_option
@cluster_option
@json_option
def node_add(
    name: str,
    keys: tuple[str, ...],
    accept_new_host_keys: bool,
    allow_local: bool,
    cluster: str | None,
    as_json: bool,
) -> None:
    """Add a host, with the keys of an inventory's node, and probe it.

    Keys that you leave out come from the `defaults:` of the cluster's inventory. A host that cannot be reached is not
    added.

    \b
    orch node add a16 host=192.168.1.52 gpu=A16 bandwidth=2.5Gbps
    """
    from orchestrator.hosts.file_again import keys_of_new_node, node_with_defaults
    from orchestrator.planning.request import parse_pairs
    from orchestrator.views import console

    checked = keys_of_new_node(name, parse_pairs(keys, "KEY=VALUE"))
    with open_controller(accept_new_host_keys) as controller:
        known = controller.store.cluster(cluster)
        new, inherited = node_with_defaults(known, checked)
        ask_about_local(controller.store.home, f"node {name}", [new], allow_local)
        if inherited:
            console.say(inherited)
        with busy(f"probing {name}"):
            probed = controller.clusters.add_node(known, checked, new)
    show_up(probed, as_json)


@node.command("remove")
@click.argument("name", shell_complete=node_names)
@cluster_option
def node_remove(name: str, cluster: str | None) -> None:
    """Take a host out of the cluster; your inventory file stays as it is.

    \b
    orch node remove a2000
    """
    from orchestrator.views import cluster_table

    with open_controller() as controller:
        cluster_table.print_cluster(controller.clusters.remove_node(controller.store.cluster(cluster), name))


@node.command("release")
@click.argument("name", shell_complete=node_names)
@cluster_option
def node_release(name: str, cluster: str | None) -> None:
    """Keep a host in the cluster, but give it no job until it is restored.

    \b
    orch node release a2000
    """
    _release(name, cluster, restore=False)


@node.command("restore")
@click.argument("name", shell_complete=node_names)
@cluster_option
def node_restore(name: str, cluster: str | None) -> None:
    """Give a released host jobs again.

    \b
    orch node restore a2000
    """
    _release(name, cluster, restore=True)


def _release(name: str, cluster: str | None, *, restore: bool) -> None:
    from orchestrator.views import cluster_table

    with open_controller() as controller:
        cluster_table.print_cluster(
            controller.clusters.release_node(controller.store.cluster(cluster), name, restore=restore)
        )
