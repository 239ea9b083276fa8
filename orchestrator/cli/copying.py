"""`cp`: small files to hosts and from them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.common import UMASK, busy, cluster_option, json_option, nodes_option, open_controller
from orchestrator.cli.complete import node_paths
from orchestrator.errors import HostError, UsageError
from orchestrator.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.controller import Controller
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.provision.copying import Copied

_ON_HOSTS = re.compile(r"([^/:]*):(.+)", re.DOTALL)


@click.command()
@click.argument("source", metavar="SRC", shell_complete=node_paths)
@click.argument("target", metavar="DST", shell_complete=node_paths)
@nodes_option
@cluster_option
@json_option
def cp(source: str, target: str, nodes: str | None, cluster: str | None, as_json: bool) -> None:
    """Copy a small file to hosts, or from them; it arrives whole and verified by SHA-256, or not at all.

    One of SRC and DST is NODE:PATH, or :PATH for all hosts (or those of --nodes). Such a path counts from the home
    folder; NODE can be a range or a pattern. In a folder the file keeps its name; no folder is ever replaced. From
    several hosts the files land in DST/NODE/NAME. Folders go by `orch data push`, results of a job by `orch pull`.

    \b
    orch cp train.toml :conf/
    orch cp v100:/var/log/nvidia-installer.log .
    orch cp --nodes 'gpu[01-16]' :/etc/hosts hosts
    """
    from orchestrator.transport.fanout import errors_by_node
    from orchestrator.views import console, documents

    side = _side(source, target, nodes)
    with open_controller() as controller:
        found = _copied(controller, controller.store.cluster(cluster), side)
    failed = errors_by_node(found)
    if as_json:
        console.print_json(documents.nodes_json(found, failed))
        console.fail_each(failed.values())
    else:
        console.print_answers(found, lambda copied: f"{copied.path} ({format_bytes(copied.bytes)})")
    if failed:
        sys.exit(HostError.exit_code)


@dataclass(frozen=True)
class Side:
    """What is on hosts: their names as --nodes has them, and the path there. here: on this machine."""

    names: str
    path: str
    here: str
    is_source: bool
    by_option: bool
    """Whether the names, if any, are those of --nodes."""


def _side(source: str, target: str, nodes: str | None) -> Side:
    """Raises UsageError where not exactly one is on hosts."""
    of_source, of_target = _ON_HOSTS.fullmatch(source), _ON_HOSTS.fullmatch(target)
    there = of_source or of_target
    if not there or (of_source and of_target):
        what = "both SRC and DST are on hosts" if there else "neither SRC nor DST is on a host"
        raise UsageError(what, "write one of them as NODE:PATH, or :PATH for all hosts; the other is on this machine")
    if there[1] and nodes:
        raise UsageError("hosts are named twice", "leave out --nodes, or write :PATH")
    here = target if of_source else source
    return Side(there[1] or nodes or "", there[2], here, bool(of_source), not there[1])


def _copied(controller: Controller, cluster: Cluster, side: Side) -> dict[str, Copied | HostError]:
    from orchestrator.provision.copying import from_hosts, read_source, to_hosts

    wanted = cluster.chosen(cluster.names(side.names))
    with busy(f"copying with {counted(len(wanted), 'host')}"):
        if not side.is_source:
            return to_hosts(controller.connections, wanted, read_source(Path(side.here)), side.path)
        one = not side.by_option and side.names in {node.name for node in cluster.nodes}
        places = _places(side, [node.name for node in wanted], one=one)
        umask = click.get_current_context().meta[UMASK]
        return from_hosts(controller.connections, wanted, side.path, places, umask=umask)


def _places(side: Side, nodes: list[str], *, one: bool) -> Callable[[str], Path]:
    """Where each node's file is to lie; makes the folders for it. Raises UsageError where it cannot lie there. one: it
    is a single node, by its own name.
    """
    from orchestrator.files import resolved

    target, name = Path(side.here), Path(side.path).name
    if name in ("", "..") or side.path.endswith("/"):
        raise UsageError(f"{side.path} is no file", "name a file on the hosts")
    if one:
        in_folder = target.is_dir() or side.here.endswith("/")
        places = {nodes[0]: target / name if in_folder else target}
    elif target.exists() and not target.is_dir():
        raise UsageError(f"{target} is no folder, and several files need one", "name a folder")
    else:
        places = {node: target / node / name for node in nodes}
    for place in map(resolved, places.values()):
        if place.exists() and not place.is_file():
            raise UsageError(f"{place} is a folder, or no regular file", "name another place")
        if not one:
            place.parent.mkdir(parents=True, exist_ok=True)
        if not place.parent.is_dir():
            raise UsageError(f"{place.parent} is no folder", "make it first")
    return places.__getitem__
