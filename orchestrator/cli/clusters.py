"""Commands about hosts: `up`, `status`, `master`, `node`, `trust`, `reap`, `down`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import accept_option, agrees, busy, cluster_option, json_option, open_controller
from orchestrator.cli.complete import node_names
from orchestrator.errors import HostError, UsageError
from orchestrator.text import some
from orchestrator.units import counted

SHOWN_JOBS, SHOWN_FILES, SHOWN_NAMES = 5, 3, 10

if TYPE_CHECKING:
    from orchestrator.clusters import Up
    from orchestrator.hosts.belongings import Cleared, Leftover, Reaped, Survey
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.hosts.facts import NodeFacts
    from orchestrator.hosts.inventory import Inventory
    from orchestrator.jobs.outputs import Unpulled
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
    shown and you are asked about them once.

    \b
    orch up inventory/a2000_v100.yaml
    orch up inventory/lab_pair.yaml --accept-new-host-keys
    """
    from orchestrator.hosts.inventory_file import load_inventory
    from orchestrator.views import console

    loaded = load_inventory(inventory)
    with open_controller(accept_new_host_keys) as controller:
        _ask_about_local(controller.store.home, loaded, allow_local)
        with busy(f"probing {counted(len(loaded.nodes), 'host')}"):
            probed = controller.clusters.up(loaded)
        terminals = controller.store.terminals()
    if terminals and terminals.name != loaded.cluster:
        console.warn(f"{terminals.by}={terminals.name} still chooses in this terminal: unset {terminals.by}")
    _show_up(probed, as_json)


def _ask_about_local(home: Home, inventory: Inventory, yes: bool) -> None:
    """Raises UsageError where its person does not want it, or is not there to be asked."""
    from orchestrator.hosts.consent import allow, is_allowed, local_commands
    from orchestrator.views import console

    commands = local_commands(inventory)
    if not commands or is_allowed(home, commands):
        return
    console.say(f"{inventory.file} would have this machine run, as you:")
    for command in commands:
        console.say(f"  {command}")
    if not yes and not agrees("Do you trust this file?"):
        raise UsageError(f"{inventory.file}: nothing of it was run", "read it, then `orch up --allow-local` with it")
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
        listed = controller.jobs.all(known.name, silent)
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
        raise UsageError("name a node, or give --elect", "orch master NODE")
    with open_controller() as controller:
        cluster_table.print_cluster(controller.clusters.pin_master(controller.store.cluster(cluster), name))


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
    from orchestrator.clusters import node_with_defaults
    from orchestrator.hosts.inventory import Inventory
    from orchestrator.hosts.inventory_file import node_from_keys
    from orchestrator.hosts.yamlfile import resolve_scalar
    from orchestrator.planning.request import parse_pairs
    from orchestrator.views import console

    values = {key: resolve_scalar(value) for key, value in parse_pairs(keys, "KEY=VALUE").items()}
    values = {"name": name, **values}
    if node_from_keys({"host": "any", **values}, "node add").prepare:
        raise UsageError("orch keeps no `prepare` of its own", "write the node into the inventory file")
    with open_controller(accept_new_host_keys) as controller:
        known = controller.store.cluster(cluster)
        made, inherited = node_with_defaults(known, values)
        alone = Inventory(cluster=known.name, nodes=(made,), file=known.file)
        _ask_about_local(controller.store.home, alone, allow_local)
        if inherited:
            console.say(inherited)
        with busy(f"probing {name}"):
            probed = controller.clusters.add_node(known, values, made)
    _show_up(probed, as_json)


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


@click.command()
@click.option("--yes", is_flag=True, help="End the processes that are ours.")
@cluster_option
@json_option
def reap(yes: bool, cluster: str | None, as_json: bool) -> None:
    """List processes that jobs without a supervisor left on the hosts; --yes ends those that are ours.

    Ours are the jobs of this cluster that were started with this $ORCH_HOME. For the others it names the owner.

    \b
    orch reap
    orch reap --yes
    """
    from orchestrator.views import console

    with open_controller() as controller:
        answers = controller.clusters.reap(controller.store.cluster(cluster), end=yes)
    found = [one for answer in answers.values() if not isinstance(answer, Exception) for one in answer.found]

    def words(answer: Reaped) -> str:
        ended = " — ended" if yes else ""
        programs = [f"stuck since a link fell silent: {program}{ended}" for program in answer.programs]
        return "; ".join([*map(_leftover_words, answer.found), *programs]) or "nothing left"

    _show_answers(answers, words, as_json)
    if not yes and any(one.mine for one in found):
        console.say("`orch reap --yes` ends " + ("them" if all(one.mine for one in found) else "ours"))
    elif not yes and any(answer.programs for answer in answers.values() if not isinstance(answer, Exception)):
        console.say("`orch reap --yes` ends them")


def _leftover_words(left: Leftover) -> str:
    said = f"{left.there.job}: {', '.join(left.processes)}"
    if not left.mine:
        return f"{said} — not ours: cluster {left.there.cluster} of {left.there.owner or 'an older orch'}"
    if left.stayed is None:
        return said
    return f"{said} — still there: {', '.join(left.stayed)}" if left.stayed else f"{said} — ended"


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_option
@json_option
def down(yes: bool, cluster: str | None, as_json: bool) -> None:
    """End this cluster's jobs and remove what we put on its hosts. Collected runs stay.

    It removes only what was started with this $ORCH_HOME on this cluster and what nobody else needs. Jobs of other
    clusters and people, and files that orch did not make, are named and left alone.

    \b
    orch down --yes
    """
    from orchestrator.jobs.outputs import unpulled
    from orchestrator.views import console

    if as_json and not yes:
        raise UsageError("`orch down --json` asks nobody", "say so with --yes")
    with open_controller() as controller:
        known = controller.store.cluster(cluster)
        if jobs := controller.store.uncollected(known.name):
            console.warn(f"jobs not collected: {len(jobs)} ({', '.join(jobs[:3])}); their files are removed, too")
        with busy(f"looking at what jobs wrote on {counted(len(known.nodes), 'host')}"):
            lost = unpulled(controller.store, controller.connections, known)
        for line in _unpulled_words(lost):
            console.warn(line)
        if not yes:
            with busy(f"looking at {counted(len(known.nodes), 'host')}"):
                surveys = controller.clusters.look(known)
            console.fail_each(seen for seen in surveys.values() if isinstance(seen, HostError))
            _say_what_goes(known, [seen for seen in surveys.values() if not isinstance(seen, HostError)])
            click.confirm(f"Do this on {counted(len(known.nodes), 'host')}?", abort=True, err=True)
        with busy(f"clearing {counted(len(known.nodes), 'host')}"):
            answers = controller.down(known)
    _show_answers(answers, _cleared_words, as_json)


def _say_what_goes(cluster: Cluster, surveys: Sequence[Survey]) -> None:
    from orchestrator.views import console

    mine = {there.job: there for survey in surveys for there in survey.mine}
    running = sorted({there.job for survey in surveys for there in survey.mine if there.alive})
    others = sorted({str(there) for survey in surveys for there in survey.others})
    strange = sorted({name for survey in surveys for name in survey.strange})
    console.say(f"ends: {', '.join(running) or 'nothing, no job of ' + cluster.name + ' runs'}")
    console.say(f"removes: {some(sorted(mine), SHOWN_NAMES) or 'no job'}; code and environments that nobody else needs")
    if others or strange:
        console.say(f"leaves alone: {some([*others, *strange], SHOWN_NAMES)}")


def _cleared_words(answer: Cleared) -> str:
    gone = [counted(len(answer.jobs), "job")] * bool(answer.jobs) + list(answer.removed)
    said = [f"ended {', '.join(answer.ended)}"] * bool(answer.ended) + [f"removed {', '.join(gone)}"] * bool(gone)
    stays = [*map(str, answer.left), *answer.strange, *answer.why]
    return "; ".join(said or ["clean" if not stays else "removed nothing"]) + (
        f"; left alone: {some(stays, SHOWN_NAMES)}" if stays else ""
    )


def _unpulled_words(lost: Unpulled) -> Iterator[str]:
    """What goes with `down` and is nowhere here, a line a job."""
    from orchestrator.units import format_bytes

    for job, files in list(lost.files.items())[:SHOWN_JOBS]:
        largest = sorted(files, key=lambda pair: pair[1].size, reverse=True)[:SHOWN_FILES]
        shown = ", ".join(f"{file.name} {format_bytes(file.size)} on {node}" for node, file in largest)
        more = f" and {len(files) - len(largest)} more" if len(files) > len(largest) else ""
        size = format_bytes(sum(file.size for _, file in files))
        lost_files = f"{counted(len(files), 'file')}, {size} ({shown}{more})"
        yield f"never pulled of {job}: {lost_files}; `orch pull {job}` brings them home"
    if others := list(lost.files.values())[SHOWN_JOBS:]:
        size = format_bytes(sum(file.size for files in others for _, file in files))
        yield f"never pulled of {counted(len(others), 'older job')}: {size}"
    for error in lost.errors.values():
        yield f"not asked what its jobs wrote: {error}"


def _show_up(probed: Up, as_json: bool) -> None:
    from orchestrator.views import cluster_table, console, documents

    if as_json:
        console.print_json(documents.cluster_json(probed.cluster))
    else:
        cluster_table.print_cluster(probed.cluster)
    for warning in probed.warnings:
        console.warn(warning)
    console.fail_each([*probed.problems.values(), *([probed.unlike] if probed.unlike else [])])
    if probed.problems or probed.unlike:
        sys.exit(3)


def _show_answers(
    answers: Mapping[str, Any],
    words: Callable[[Any], str],
    as_json: bool,
) -> None:
    from orchestrator.views import console, documents

    failed = {name: answer for name, answer in answers.items() if isinstance(answer, Exception)}
    if as_json:
        console.print_json(documents.nodes_json(answers, failed))
    else:
        console.print_answers(answers, words)
    if failed:
        sys.exit(3)
