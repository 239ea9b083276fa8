"""Commands about hosts: `up`, `status`, `master`, `node`, `trust`, `reap`, `down`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import (
    accept_option,
    busy,
    cluster_option,
    json_option,
    open_controller,
)
from orchestrator.cli.complete import node_names
from orchestrator.errors import UsageError

SHOWN_JOBS, SHOWN_FILES = 5, 3

if TYPE_CHECKING:
    from orchestrator.clusters import Up
    from orchestrator.controller import Unpulled


@click.command()
@click.argument("inventory", type=click.Path(path_type=Path))
@accept_option
@json_option
def up(inventory: Path, accept_new_host_keys: bool, as_json: bool) -> None:
    """Connect to every host, probe it, elect the master and say why.

    The cluster is remembered as the current one. Exit code 3 if a host cannot be used; the others still can.

    \b
    orch up inventory/a2000_v100.yaml
    orch up inventory/lab_pair.yaml --accept-new-host-keys
    """
    from orchestrator.inventory import load_inventory

    loaded = load_inventory(inventory)
    with open_controller(accept_new_host_keys) as controller, busy(f"probing {len(loaded.nodes)} hosts"):
        found = controller.clusters.up(loaded)
    _show_up(found, as_json)


@click.command()
@cluster_option
@json_option
def status(cluster: str | None, as_json: bool) -> None:
    """The cluster as last probed, and its latest jobs.

    \b
    orch status
    orch status --json | jq .cluster.master
    """
    from orchestrator import console

    with open_controller() as controller:
        found = controller.store.cluster(cluster)
        told = controller.jobs(found.name)
        jobs = told.records[:10]
    if as_json:
        document = {"cluster": console.cluster_json(found), "jobs": console.jobs_json(jobs, told.unheard)["jobs"]}
        console.print_json({"schema": 1, **document})
        return console.warn_unheard(told.unheard)
    console.print_cluster(found)
    for name, problem in found.problems.items():
        console.fail(f"{name}: {problem.message}", problem.remedy)
    if jobs:
        console.print_jobs(jobs)
    console.warn_unheard(told.unheard)
    return None


@click.command()
@click.argument("name", metavar="NODE", required=False, shell_complete=node_names)
@click.option("--elect", is_flag=True, help="Take the pin back: let the election choose again.")
@cluster_option
def master(name: str | None, elect: bool, cluster: str | None) -> None:
    """Pin the master of the current cluster; it beats the election.

    \b
    orch master v100
    orch master --elect
    """
    from orchestrator import console

    if bool(name) == elect:
        raise UsageError("name a node, or give --elect", "orch master NODE")
    with open_controller() as controller:
        console.print_cluster(controller.clusters.pin_master(controller.store.cluster(cluster), name))


@click.group()
def node() -> None:
    """Add, remove, release or restore nodes of the current cluster, never touching your file.

    \b
    orch node add a16 host=192.168.1.52 gpu=A16 bandwidth=2.5Gbps
    orch node release a2000
    """


@node.command("add")
@click.argument("name")
@click.argument("keys", nargs=-1, metavar="KEY=VALUE...")
@accept_option
@cluster_option
@json_option
def node_add(name: str, keys: tuple[str, ...], accept_new_host_keys: bool, cluster: str | None, as_json: bool) -> None:
    """Add a host, with the keys of an inventory's node, and probe it.

    \b
    orch node add a16 host=192.168.1.52 user=ubuntu gpu=A16 bandwidth=2.5Gbps
    """
    from orchestrator.inventory import node_from_keys
    from orchestrator.request import parse_pairs
    from orchestrator.yamlfile import resolve_scalar

    values = {key: resolve_scalar(value) for key, value in parse_pairs(keys, "KEY=VALUE").items()}
    made = node_from_keys({"name": name, **values}, "node add")
    with open_controller(accept_new_host_keys) as controller, busy(f"probing {name}"):
        found = controller.clusters.add_node(controller.store.cluster(cluster), made)
    _show_up(found, as_json)


@node.command("remove")
@click.argument("name", shell_complete=node_names)
@cluster_option
def node_remove(name: str, cluster: str | None) -> None:
    """Take a host out of the cluster; your inventory file stays as it is.

    \b
    orch node remove a2000
    """
    from orchestrator import console

    with open_controller() as controller:
        console.print_cluster(controller.clusters.remove_node(controller.store.cluster(cluster), name))


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
    from orchestrator import console

    with open_controller() as controller:
        console.print_cluster(
            controller.clusters.release_node(controller.store.cluster(cluster), name, restore=restore)
        )


@click.command()
@click.argument("name", metavar="NODE", shell_complete=node_names)
@click.option("--inventory", type=click.Path(path_type=Path), help="Look the node up here, before the first `orch up`.")
@click.option("--yes", is_flag=True, help="Record without asking: you have compared the fingerprint by other means.")
@cluster_option
def trust(name: str, inventory: Path | None, yes: bool, cluster: str | None) -> None:
    """Show a host's key and record it once you have compared its fingerprint.

    Compare with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the host's own console.

    \b
    orch trust v100
    orch trust v100 --inventory inventory/a2000_v100.yaml
    """
    from orchestrator import console
    from orchestrator.connections import target_of
    from orchestrator.inventory import load_inventory
    from orchestrator.transport import ssh
    from orchestrator.transport.hostkeys import HostKeys

    with open_controller() as controller:
        found = load_inventory(inventory) if inventory else controller.store.cluster(cluster)
        host_keys = HostKeys.default(controller.store.home)
        offered = None
        while offered is None or offered.peer.jump:  # the jump hosts on the way come first
            offered = ssh.fetch_host_key(target_of(found.node(name)), host_keys=host_keys)
            console.say(f"{offered.peer} shows the {offered.key.get_name()} key {offered.fingerprint}")
            if not yes and not click.confirm("Is this the fingerprint of that host?", default=False, err=True):
                raise UsageError(f"{name}: its key was not recorded", "compare it on the host's own console")
            host_keys.check(offered.peer, offered.key, accept_new=True)
        console.say(f"recorded in {controller.store.home.known_hosts}")


@click.command()
@click.option("--yes", is_flag=True, help="End them.")
@cluster_option
@json_option
def reap(yes: bool, cluster: str | None, as_json: bool) -> None:
    """List, and with --yes end, what our earlier jobs left on the hosts. Never touches a foreign process.

    \b
    orch reap
    orch reap --yes
    """
    from orchestrator import console

    with open_controller() as controller:
        answers = controller.clusters.reap(controller.store.cluster(cluster), end=yes)

    def words(answer: dict[str, Any]) -> str:
        found = [f"{job['job']}: {', '.join(job['processes'])}" for job in answer["found"]]
        stayed = [process for job in answer["found"] for process in job.get("stayed", ())]
        ended = f" — still there: {', '.join(stayed)}" if stayed else " — ended" if yes else ""
        stuck = [f"stuck since a link fell silent: {program}" for program in answer["programs"]]
        return "; ".join([*found, *stuck]) + ended if found or stuck else "nothing left"

    _show_answers(answers, words, as_json)
    if not yes and any(
        isinstance(answer, dict) and (answer["found"] or answer["programs"]) for answer in answers.values()
    ):
        console.say("`orch reap --yes` ends them")


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_option
@json_option
def down(yes: bool, cluster: str | None, as_json: bool) -> None:
    """End this cluster's jobs and remove what we put on its hosts. Collected runs stay.

    \b
    orch down --yes
    """
    from orchestrator import console

    if as_json and not yes:
        raise UsageError("`orch down --json` asks nobody", "say so with --yes")
    with open_controller() as controller:
        found = controller.store.cluster(cluster)
        if jobs := controller.store.uncollected(found.name):
            console.warn(f"jobs not collected: {len(jobs)} ({', '.join(jobs[:3])}); their files go, too")
        with busy(f"looking at what jobs wrote on {len(found.nodes)} hosts"):
            lost = controller.unpulled(found)
        for line in _unpulled_words(lost):
            console.warn(line)
        question = f"End the jobs of {found.name} and remove our files from {len(found.nodes)} hosts?"
        if not yes:
            click.confirm(question, abort=True, err=True)
        with busy(f"clearing {len(found.nodes)} hosts"):
            answers = controller.clusters.down(found)
    _show_answers(
        answers, lambda answer: f"removed {', '.join(answer['removed'])}" if answer["removed"] else "clean", as_json
    )


def _unpulled_words(lost: Unpulled) -> Iterator[str]:
    """What goes with `down` and is nowhere here, a line a job."""
    from orchestrator.units import format_bytes

    for job, files in list(lost.files.items())[:SHOWN_JOBS]:
        largest = sorted(files, key=lambda pair: pair[1].size, reverse=True)[:SHOWN_FILES]
        some = ", ".join(f"{file.name} {format_bytes(file.size)} on {node}" for node, file in largest)
        more = f" and {len(files) - len(largest)} more" if len(files) > len(largest) else ""
        size = format_bytes(sum(file.size for _, file in files))
        yield f"never pulled of {job}: {len(files)} files, {size} ({some}{more}); `orch pull {job}` brings them home"
    if others := list(lost.files.values())[SHOWN_JOBS:]:
        size = format_bytes(sum(file.size for files in others for _, file in files))
        yield f"never pulled of {len(others)} older jobs: {size}"
    for error in lost.errors.values():
        yield f"not asked what its jobs wrote: {error}"


def _show_up(found: Up, as_json: bool) -> None:
    from orchestrator import console

    if as_json:
        console.print_json(console.cluster_json(found.cluster))
    else:
        console.print_cluster(found.cluster)
    for warning in found.warnings:
        console.warn(warning)
    console.fail_each(found.problems.values())
    if found.problems:
        sys.exit(3)


def _show_answers(answers: dict[str, Any], words: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    from orchestrator import console

    if as_json:
        nodes = {name: a if isinstance(a, dict) else {"error": str(a)} for name, a in answers.items()}
        console.print_json({"schema": 1, "nodes": nodes})
    else:
        console.print_answers(answers, words)
    if any(isinstance(answer, Exception) for answer in answers.values()):
        sys.exit(3)
