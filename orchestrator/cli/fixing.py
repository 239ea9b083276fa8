"""What `orch doctor --fix` mends: only what is ours, by name, and with its person's word."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrator.cli.cleaning import leftover_words
from orchestrator.cli.common import busy, insist
from orchestrator.errors import HostError
from orchestrator.units import counted

if TYPE_CHECKING:
    from orchestrator.controller import Controller
    from orchestrator.doctor.judge import Diagnosis
    from orchestrator.hosts.belongings import Mended
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.hosts.inventory import Node

Lines = dict[str, list[str]]
"""By host, what was done there."""
HERE = "this machine"
"""No host is called so."""


def fix_leftovers(controller: Controller, cluster: Cluster, nodes: Sequence[Node], yes: bool) -> Lines:
    """What starts and ends that were cut short left behind. Raises click.Abort for a no."""
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
    return _said(done)


def fix_environments(controller: Controller, cluster: Cluster, found: Diagnosis, yes: bool) -> Lines:
    """Those of `orch setup` that do not start, or have lost their torch, are made again."""
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
    return _said(done)


def _agreed(todo: Mapping[str, Sequence[str]], yes: bool) -> bool:
    """Whether there is something to do, and it is wanted. Raises click.Abort, UsageError as `insist` has it."""
    from orchestrator.views import console

    lines = [f"{name}: would {line}" for name, listed in todo.items() for line in listed]
    if lines and not yes:
        for line in lines:
            console.say(line)
        insist("Do this?")
    return bool(lines)


def _said(done: Lines) -> Lines:
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
