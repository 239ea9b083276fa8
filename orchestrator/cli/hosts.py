"""Commands about hosts and remembered clusters: `data push`, `setup`, `node`, `clusters`, `use`."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.clusters import allow_local_option, ask_about_local, show_up
from orchestrator.cli.common import (
    accept_option,
    busy,
    cluster_names,
    cluster_option,
    insist,
    json_option,
    node_names,
    nodes_option,
    open_controller,
    torch_versions,
)
from orchestrator.errors import HostError
from orchestrator.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.controller import Controller
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.hosts.inventory import Node
    from orchestrator.provision.push import DataSets, Pushed
    from orchestrator.provision.service import Setup
    from orchestrator.provision.venvs import Made, WantedVersions


TYPES = "change the types in its file, then `orch up` again"
"""For commands about single hosts, on a cluster of Slurm."""


@click.group()
def data() -> None:
    """Copy data sets to the hosts, list and remove them.

    \b
    orch data push ~/data
    orch data list
    """


@data.command("push")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--to", metavar="NAME_OR_PATH", help="A folder inside the data folder, or any path. [default: ~/data itself]"
)
@nodes_option
@cluster_option
@json_option
def data_push(folder: Path, to: str | None, nodes: str | None, cluster: str | None, as_json: bool) -> None:
    """Copy the data set in DIR to every host and verify it; only missing or changed files are sent.

    The files land in the hosts' data folder, where `orch run --exp` looks for them; your own script finds it as
    os.environ["ORCH_DATA"]. Interrupted pushes resume: run the same command again.

    \b
    orch data push ~/data                   ~/data/MNIST/raw/... and the like
    orch data push birds --to birds         into ~/data/birds
    orch data push ~/data --to /mnt/data    then: --set data_dir=/mnt/data
    """
    from orchestrator.cli.boards import hash_board, push_board
    from orchestrator.planning.placement import expanded_here, homes_of
    from orchestrator.provision.push import read_manifest
    from orchestrator.provision.service import DATA_FOLDER, Provision, data_folder
    from orchestrator.views import console

    with open_controller() as controller:
        known = controller.store.cluster(cluster)
        wanted = known.with_files(nodes)
        target = data_folder(to)
        for note in expanded_here("--to", "", target, str(Path.home()), homes_of(wanted, known.facts)):
            console.warn(note)
        with hash_board(str(folder)) as show_hashed:
            manifest = read_manifest(folder, show_hashed)
        names = [node.name for node in wanted]
        try:
            with push_board(names, manifest.size_bytes) as show:
                found = Provision(controller.store, controller.connections).push(wanted, manifest, target, show)
        except KeyboardInterrupt:
            console.say("what has arrived stays on the hosts; the same command resumes there")
            raise
    whole = {"folder": target, "files": len(manifest.files), "bytes": manifest.size_bytes}

    _show(found, _pushed_words, whole if as_json else None)
    if target != DATA_FOLDER:
        console.say(use_words(target))


def use_words(folder: str) -> str:
    """folder: not the data folder itself."""
    in_script = re.sub("^~", "$HOME", re.sub("^~/data/", "$ORCH_DATA/", folder))
    setting = shlex.quote(f"data_dir={folder}")
    return f"use it: orch run --exp ... --set {setting}; a script of yours finds it in {in_script}"


@data.command("list")
@click.argument("folder", metavar="[NAME_OR_PATH]", required=False)
@nodes_option
@cluster_option
@json_option
def data_list(folder: str | None, nodes: str | None, cluster: str | None, as_json: bool) -> None:
    """List the data sets that `orch data push` brought to each host: in ~/data and its folders, or another place.

    \b
    orch data list
    orch data list /mnt/data --nodes v100
    """
    target, found = _data_sets(folder, nodes, cluster, remove=False)
    _show(found, _sets_words, {"folder": target} if as_json else None)


@data.command("remove")
@click.argument("folder", metavar="NAME_OR_PATH")
@click.option("--yes", is_flag=True, help="Do not ask.")
@nodes_option
@cluster_option
@json_option
def data_remove(folder: str, nodes: str | None, cluster: str | None, yes: bool, as_json: bool) -> None:
    """Remove a data set that `orch data push` brought to the hosts, after asking.

    Only files that came by a push, and have not changed since, are removed; then folders that are empty.

    \b
    orch data remove birds              what came with --to birds
    orch data remove '~/data' --yes     and the sets in its folders
    """
    from orchestrator.views import console

    target, found = _data_sets(folder, nodes, cluster, remove=False)
    there = {name: answer for name, answer in found.items() if not isinstance(answer, HostError) and answer.sets}
    if there and not yes:
        console.print_answers(there, _sets_words)
        insist(f"Remove this from {counted(len(there), 'host')}?")
    if there:
        _, found = _data_sets(folder, nodes, cluster, remove=True)
    _show(found, lambda sets: _sets_words(sets, done="removed "), {"folder": target} if as_json else None)
    if not there:
        _, pushed = _data_sets(None, nodes, cluster, remove=False)
        for name, answer in pushed.items():
            if not isinstance(answer, HostError) and answer.sets:
                console.say(f"{name} has {_sets_words(answer)}")


def _data_sets(
    to: str | None, nodes: str | None, cluster: str | None, *, remove: bool
) -> tuple[str, dict[str, DataSets | HostError]]:
    """The folder, and each host's answer."""
    from orchestrator.planning.placement import expanded_here, homes_of
    from orchestrator.provision.service import Provision, data_folder
    from orchestrator.views import console

    with open_controller() as controller:
        known = controller.store.cluster(cluster)
        wanted, target = known.with_files(nodes), data_folder(to)
        notes = expanded_here("NAME_OR_PATH", "", target, str(Path.home()), homes_of(wanted, known.facts))
        for note in () if remove else notes:  # it was shown when the hosts were asked what there is
            console.warn(note)
        return target, Provision(controller.store, controller.connections).data_sets(wanted, target, remove=remove)


def _sets_words(answer: DataSets, done: str = "") -> str:
    words = []
    for found in answer.sets:
        kept = f"; left {counted(found.kept, 'file')} that changed or is not yours" if found.kept else ""
        words.append(f"{done}{found.folder}: {counted(found.files, 'file')}, {format_bytes(found.bytes)}{kept}")
    return "; ".join(words) or "no data set that `orch data push` brought"


def _pushed_words(pushed: Pushed) -> str:
    sent = f"{counted(pushed.files, 'file')}, {format_bytes(pushed.bytes)} sent" if pushed.files else "up to date"
    return f"{pushed.folder} is complete; {sent}"


@click.command()
@click.option(
    "--torch",
    metavar="X.Y.Z",
    help="Install this torch, also on hosts that have another one.",
    shell_complete=torch_versions,
)
@click.option(
    "--torchvision", metavar="X.Y.Z", help="Install this torchvision. [default: the one that matches that torch]"
)
@click.option(
    "-r",
    "--requirements",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Install the packages that your script needs, by pip; torch stays as it is.",
)
@nodes_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_option
@json_option
def setup(
    torch: str | None,
    torchvision: str | None,
    requirements: Path | None,
    nodes: str | None,
    yes: bool,
    cluster: str | None,
    as_json: bool,
) -> None:
    """Give hosts without torch an environment that has it, in their work folder, by uv or pip.

    Without --torch, hosts that have a torch keep it. The others get the same version; if no host has torch, they get
    this machine's, or the newest known that runs on the GPUs and drivers of all hosts. `up` and `run` then use the
    environment's Python; `orch down` removes it. A host without internet access needs PIP_INDEX_URL, PIP_FIND_LINKS or
    HTTPS_PROXY in its `env:`.

    \b
    orch setup
    orch setup --nodes a16 --torch 2.3.1 --yes
    orch setup -r requirements.txt             a host that has a torch keeps it
    """
    from dataclasses import replace

    from orchestrator.planning.requirements import read_requirements
    from orchestrator.provision.service import gpu_hosts
    from orchestrator.provision.venvs import choose
    from orchestrator.views import console

    extra = read_requirements(requirements) if requirements else None
    with open_controller() as controller:
        known = controller.store.own_cluster(cluster, "`orch run --requirements`, or a `python:` on the shared disk")
        picked = known.chosen(known.names(nodes))
        wanted = choose(torch, torchvision, gpu_hosts(known, picked))
        if extra:
            wanted = replace(wanted, extra=extra)
        _agree(setup_question(known, picked, wanted, requirements), wanted, yes=yes)
        found = _set_up(controller, known, picked, wanted)
    if found.up and found.up.unlike:
        console.warn(str(found.up.unlike))
    _show(
        found.outcomes,
        lambda made: _made_words(made, requirements),
        {"torch": wanted.torch, "torchvision": wanted.torchvision} if as_json else None,
        found.up.problems if found.up else {},
    )


def _set_up(controller: Controller, cluster: Cluster, nodes: Sequence[Node], wanted: WantedVersions) -> Setup:
    from orchestrator.cli.boards import setup_board
    from orchestrator.provision.service import Provision
    from orchestrator.views import console

    try:
        with setup_board([node.name for node in nodes]) as show:
            return Provision(controller.store, controller.connections).set_up(cluster, nodes, wanted, show)
    except KeyboardInterrupt:
        console.say("ended on every host; the next `orch setup` rebuilds partial environments")
        raise


def _agree(question: str, wanted: WantedVersions, *, yes: bool) -> None:
    from orchestrator.views import console

    if question and wanted.reason:
        console.say(f"torch {wanted.torch}: {wanted.reason}")
    if question and not yes:
        insist(question)


def _made_words(made: Made, requirements: Path | None) -> str:
    what = f"torch {made.torch} and torchvision {made.torchvision}"
    return {
        "own": f"has {what} by itself",
        "kept": f"has {what} in its environment already",
        "made": f"got {what}",
        "added": f"has {what}, and got what {requirements} asks for",
    }[made.state]


def setup_question(cluster: Cluster, nodes: Sequence[Node], wanted: WantedVersions, requirements: Path | None) -> str:
    """ "" if no host is known to lack anything."""
    from orchestrator.hosts.exec import host_set

    lacking, parts = [node.name for node in nodes if _lacks(cluster, node.name, wanted)], []
    if lacking:
        torchvision = f" {wanted.torchvision}" if wanted.torchvision else ""
        parts.append(f"torch {wanted.torch} and torchvision{torchvision} on {host_set(lacking)}")
    if requirements:
        count = counted(len(wanted.extra.packages), "requirement")
        parts.append(f"{count} of {requirements} on {host_set([node.name for node in nodes])}")
    return f"Install {', and '.join(parts)}?" if parts else ""


def _lacks(cluster: Cluster, name: str, wanted: WantedVersions) -> bool:
    torch = cluster.facts[name].torch if name in cluster.facts else None
    return not torch or not (wanted.any_torch or wanted.torch in (torch.version, torch.version.partition("+")[0]))


def _show(
    found: Mapping[str, Any],
    words: Callable[[Any], str],
    document: dict[str, Any] | None,
    problems: Mapping[str, HostError] | None = None,
) -> None:
    from orchestrator.views import console, documents

    failed = {name: outcome for name, outcome in found.items() if isinstance(outcome, HostError)}
    failed |= {name: error for name, error in (problems or {}).items() if name in found and name not in failed}
    if document is not None:
        console.print_json(documents.nodes_json(found, failed, document))
    else:
        console.print_answers({name: answer for name, answer in found.items() if name not in failed}, words)
    console.fail_each(failed.values())
    if failed:
        sys.exit(HostError.exit_code)


# `node`.


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

    Keys that you leave out come from the `defaults:` of the cluster's inventory; without keys, a host that was removed
    comes back. A host that cannot be reached is not added.

    \b
    orch node add a16 host=192.168.1.52 gpu=A16 bandwidth=2.5Gbps
    """
    from orchestrator.hosts.inventory_file import keys_of_new_node, node_with_defaults, removed_node
    from orchestrator.planning.request import parse_pairs
    from orchestrator.views import console

    checked = keys_of_new_node(name, parse_pairs(keys, "KEY=VALUE"))
    with open_controller(accept_new_host_keys) as controller:
        known = controller.store.own_cluster(cluster, TYPES)
        back = None if keys else removed_node(known, name)
        new, inherited = (back, f"{name} is as in {known.file}") if back else node_with_defaults(known, checked)
        ask_about_local(controller.store.home, f"node {name}", [new], allow_local)
        if inherited:
            console.say(inherited)
        with busy(f"probing {name}"):
            probed = controller.clusters.add_node(known, {} if back else checked, new)
    show_up(probed, as_json)


@node.command("remove")
@click.argument("name", shell_complete=node_names)
@cluster_option
def node_remove(name: str, cluster: str | None) -> None:
    """Take a host out of the cluster; your inventory file stays as it is.

    \b
    orch node remove a2000
    """
    from orchestrator.views import host_tables

    with open_controller() as controller:
        known = controller.store.own_cluster(cluster, TYPES)
        host_tables.print_cluster(controller.clusters.remove_node(known, name))


@node.command("release")
@click.argument("name", shell_complete=node_names)
@cluster_option
def node_release(name: str, cluster: str | None) -> None:
    """Keep a host, but give it no job until `restore`.

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
    from orchestrator.views import host_tables

    with open_controller() as controller:
        host_tables.print_cluster(
            controller.clusters.release_node(controller.store.own_cluster(cluster, TYPES), name, restore=restore)
        )


# `clusters`, `use`.


@click.command()
@json_option
def clusters(as_json: bool) -> None:
    """List the remembered clusters; `*` marks the current one.

    \b
    orch clusters
    orch clusters --json | jq -r .current.name
    """
    from orchestrator.views import console, documents
    from orchestrator.views import console as tables

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
    """Make a remembered cluster the current one, for all terminals; works offline.

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
