"""`doctor`: checks hosts and links before a job fails."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.clusters import allow_local_option, ask_about_local, leftover_words
from orchestrator.cli.common import (
    accept_option,
    busy,
    cluster_option,
    insist,
    json_option,
    nodes_option,
    open_controller,
)
from orchestrator.errors import HostError, UsageError
from orchestrator.units import counted

if TYPE_CHECKING:
    from orchestrator.controller import Controller
    from orchestrator.doctor.observations import Observations
    from orchestrator.doctor.table import Diagnosis
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.hosts.inventory import Node
    from orchestrator.hosts.work_folders import Mended


@click.command()
@click.argument("inventory", metavar="[INVENTORY]", type=click.Path(path_type=Path), required=False)
@nodes_option
@click.option("--collective", is_flag=True, help="Also run a short all-reduce on all hosts, as a job.")
@click.option("--fix", is_flag=True, help="First repair what your own jobs left: see above.")
@click.option("--yes", is_flag=True, help="With --fix: do not ask.")
@accept_option
@allow_local_option
@cluster_option
@json_option
def doctor(
    inventory: Path | None,
    nodes: str | None,
    collective: bool,
    fix: bool,
    yes: bool,
    accept_new_host_keys: bool,
    allow_local: bool,
    cluster: str | None,
    as_json: bool,
) -> None:
    """Check every host and every pair of hosts for what may fail a job, with the remedy for each finding.

    Checks logins, versions, drivers and GPUs, limits, disks and clocks; then all hosts connect to each other, both
    ways, and send a little. Nothing is installed or left running. Without an INVENTORY the hosts of the current cluster
    are checked. On Slurm it is the login host; each job checks its hosts.

    With --collective, if nothing blocks it, a job that all-reduces 1 KiB and 8 MiB follows. It uses the GPUs, for about
    10 s and torch's start. If it fails, fewer hosts are tried until the guilty host, or pair, is found.

    --fix ends processes that your jobs left, resumes your stopped supervisors, cleans up interrupted starts, uploads
    and deletions, and rebuilds environments of `orch setup` that do not start, after asking. It touches nothing of
    other people or of running jobs.

    The exit code is 0 if nothing blocks a job, 1 if a finding does, 3 if a host could not be reached.

    \b
    orch doctor
    orch doctor --nodes 'gpu[01-16]' --collective
    orch doctor --fix
    orch doctor rack.yaml
    orch doctor --json | jq '.findings[] | select(.level == "block")'
    """
    from orchestrator.doctor.table import judge
    from orchestrator.views import console, host_tables
    from orchestrator.views.documents import doctor_json

    _refuse(inventory, cluster, collective, fix, as_json and not yes)
    fixed = dict[str, list[str]]()
    with open_controller(accept_new_host_keys) as controller:
        if inventory:
            name, wanted = _of_file(controller, inventory, nodes, allow_local)
            seen = _look(controller, wanted, None)
        else:
            known = controller.store.cluster(cluster)
            if collective or fix:
                known.refuse_engine("`orch run --exp collectives` measures its network; `orch cancel` ends jobs")
            name, wanted = known.name, known.with_files(nodes)
            fixed = fix_leftovers(controller, known, wanted, yes) if fix else {}
            seen = _look(controller, wanted, known.master)
            if fix and (made := fix_environments(controller, known, judge(seen), yes)):
                fixed |= {host: [*fixed.get(host, []), *lines] for host, lines in made.items()}
                wanted = controller.store.cluster(name).chosen([node.name for node in wanted])
                seen = _look(controller, wanted, known.master)
        found = judge(_with_collective(controller, name, seen) if collective else seen)
    if as_json:
        console.print_json({**doctor_json(name, found), "fixed": fixed})
    else:
        host_tables.print_diagnosis(found)
    if found.seen.unreached:
        sys.exit(HostError.exit_code)
    if found.blocks:
        sys.exit(1)


def _refuse(inventory: Path | None, cluster: str | None, collective: bool, fix: bool, nobody_is_asked: bool) -> None:
    if inventory and cluster:
        raise UsageError(f"{inventory} and --cluster at once", "take one of them")
    if inventory and collective:
        raise UsageError("--collective runs a job, which needs a cluster that is up", f"`orch up {inventory}` first")
    if inventory and fix:
        raise UsageError(
            "--fix repairs what the jobs of a cluster left, which has to be up", f"`orch up {inventory}` first"
        )
    if fix and nobody_is_asked:
        raise UsageError("`orch doctor --fix --json` cannot ask for your consent", "add --yes to give it")


def _look(controller: Controller, nodes: Sequence[Node], master: str | None) -> Observations:
    from orchestrator.clusters import NO_ACCOUNTS
    from orchestrator.doctor.look import look
    from orchestrator.provision.service import DATA_FOLDER
    from orchestrator.views import console

    if nodes[0].transport == "slurm":  # the login host
        _, facts = controller.clusters.ask_login(nodes[0])
        if not facts.accounts:
            console.warn(NO_ACCOUNTS)
    with busy(f"examining {counted(len(nodes), 'host')}") as show:
        return look(controller.connections, nodes, data=DATA_FOLDER, master=master, show=show)


def _with_collective(controller: Controller, cluster: str, seen: Observations) -> Observations:
    from dataclasses import replace

    from orchestrator.doctor.table import judge
    from orchestrator.measuring.smoke import with_smoke

    if len(seen.hosts) < 2:
        return seen
    if judge(seen).blocks:
        return replace(seen, why_no_collective="a finding blocks it")
    with busy("an all-reduce") as show:
        return with_smoke(controller, controller.store.cluster(cluster), seen, show)


def _of_file(controller: Controller, file: Path, listed: str | None, allow_local: bool) -> tuple[str, Sequence[Node]]:
    from orchestrator.hosts.cluster import login_host
    from orchestrator.hosts.grammar import names_in
    from orchestrator.hosts.inventory_file import load_inventory

    loaded = load_inventory(file)
    ask_about_local(controller.store.home, loaded.file, loaded.nodes, allow_local)
    if loaded.engine:
        return loaded.cluster, [login_host(loaded.nodes[0], loaded.engine)]
    only = names_in(listed, [node.name for node in loaded.nodes], str(file))
    return loaded.cluster, [loaded.node(one) for one in dict.fromkeys(only)] or loaded.nodes


# Repairs for `orch doctor --fix`: only of our own files and processes, and with consent.

Lines = dict[str, list[str]]
HERE = "this machine"


def fix_leftovers(controller: Controller, cluster: Cluster, nodes: Sequence[Node], yes: bool) -> Lines:
    """After interrupted starts and ends. Raises click.Abort for a no."""
    with busy(f"looking at what is left on {counted(len(nodes), 'host')}"):
        there = controller.clusters.mend(cluster, nodes, end=False)
    half = controller.store.half_started()
    todo = {name: list(_todo(mended)) for name, mended in there.items() if not isinstance(mended, HostError)}
    todo[HERE] = [f"settle the start of {job}, which was cut short" for job in half]
    if not _agreed(todo, yes):
        return {}
    controller.jobs.settle_half_starts()
    with busy("putting it in order"):
        answers = controller.clusters.mend(cluster, nodes, end=True)
    done = {HERE: [f"settled the start of {job}" for job in half]}
    done |= {name: list(_done(mended)) for name, mended in answers.items() if not isinstance(mended, HostError)}
    return _report(done)


def fix_environments(controller: Controller, cluster: Cluster, found: Diagnosis, yes: bool) -> Lines:
    from orchestrator.provision.service import Provision
    from orchestrator.provision.venvs import WantedVersions

    broken = [node for one in found.findings if (one.id, one.level) == ("P04", "block") for node in one.where]
    names = sorted({name for name in broken if name in cluster.venvs}, key=lambda name: cluster.venvs[name].torch)
    todo = {name: [f"make its environment with torch {cluster.venvs[name].torch} again"] for name in names}
    if not _agreed(todo, yes):
        return {}
    done = Lines()
    provision = Provision(controller.store, controller.connections)
    for _, alike in itertools.groupby(names, lambda name: cluster.venvs[name].torch):
        nodes = [cluster.node(name) for name in alike]
        venv = cluster.venvs[nodes[0].name]
        with busy(f"making the environment on {', '.join(node.name for node in nodes)}"):
            torchvision = venv.torchvision if "vision" in venv.python.rpartition("/venv/")[2] else None
            made = provision.set_up(cluster, nodes, WantedVersions(venv.torch, torchvision, any_torch=False))
        for name, one in made.outcomes.items():
            done[name] = [str(one)] if isinstance(one, HostError) else [f"made its environment, torch {one.torch}"]
    return _report(done)


def _agreed(todo: Mapping[str, Sequence[str]], yes: bool) -> bool:
    """Whether there are repairs, and the user agrees. Raises click.Abort, UsageError."""
    from orchestrator.views import console

    lines = [f"{name}: would {line}" for name, listed in todo.items() for line in listed]
    if lines and not yes:
        for line in lines:
            console.say(line)
        insist("Do this?")
    return bool(lines)


def _report(done: Lines) -> Lines:
    from orchestrator.views import console

    for name, lines in done.items():
        for line in lines:
            console.say(f"fixed: {name}: {line}")
    return {name: lines for name, lines in done.items() if lines}


def _todo(mended: Mended) -> Iterator[str]:
    for left in mended.reaped.found:
        if left.mine:
            yield f"end or wake {leftover_words(left)}"
    yield from (f"end {program}, stuck since a link fell silent" for program in mended.reaped.programs)
    yield from (f"remove {folder}, which no job will need" for folder in mended.folders)


def _done(mended: Mended) -> Iterator[str]:
    yield from (leftover_words(left) for left in mended.reaped.found if left.mine)
    yield from (f"ended {program}" for program in mended.reaped.programs)
    yield from (f"removed {folder}" for folder in mended.folders)
    yield from mended.why
