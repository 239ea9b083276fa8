"""Hosts that Slurm declares: an inventory of their types, and the hosts of each type of an inventory. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from orchestrator.errors import UsageError
from orchestrator.hosts.forms.imported import node_name
from orchestrator.hosts.inventory import Inventory, Node
from orchestrator.hosts.inventory_file import parse_inventory
from orchestrator.hosts.yamlfile import yaml_of
from orchestrator.slurm.answers import DeclaredHost, GpuCount, gpu_counts
from orchestrator.units import counted, some

_FEATURES = re.compile(r"[\w.-]+(&[\w.-]+)*")
"""Constraints that are judged here; Slurm judges all others."""


def slurm_inventory(login: str, cluster: str, target: str, hosts: Sequence[DeclaredHost]) -> tuple[str, list[str]]:
    """target: for messages. Also returns the hosts that are left out, with the reason. Raises UsageError without any
    GPU.
    """
    types: dict[tuple[GpuCount, str], list[DeclaredHost]] = defaultdict(list)
    left_out = []
    for host in hosts:
        if len(host.gpus) > 1:
            kinds = " and ".join(f"{each.count} {each.kind}" for each in host.gpus)
            left_out.append(f"{host.name}: left out, it has two kinds of GPU ({kinds}); write a `slurm:` of its own")
        elif not host.gpus or not host.partitions:
            left_out.append(f"{host.name}: left out, it has no {'GPU' if host.partitions else 'partition'}")
        else:
            types[host.gpus[0], host.partitions[0]].append(host)
            if not host.is_up:
                left_out.append(f"{host.name}: is {host.state} now{f' ({host.reason})' if host.reason else ''}")
    if not types:
        raise UsageError(f"Slurm on {login} declares no host with a single kind of GPU", "write the inventory by hand")
    names = Counter(gpus.kind or "gpu" for gpus, _ in types)
    lines = [f"# Written by `orch init` from Slurm on {login}: {counted(len(hosts), 'host')}.", f"cluster: {cluster}"]
    lines += ["# workdir: a folder on a disk that the login host and all hosts share."]
    lines += [f"engine: {_flow({'slurm': {'login': login, 'workdir': '~/orch'}})}"]
    lines += [
        "# python: with torch, and orch's own packages; `orch up` names missing ones.",
        "defaults: {python: python3}",
    ]
    lines += ["nodes:"]
    for (gpus, partition), of_type in types.items():
        kind = gpus.kind or "gpu"
        name = node_name(kind if names[kind] == 1 else f"{kind}-{gpus.count}-{partition}")
        gres = ":".join(["gpu", *([gpus.kind] if gpus.kind else []), str(gpus.count)])
        keys = {"name": name, "gpus": gpus.count, "slurm": {"gres": gres, "partition": partition}}
        known = {"gpu": gpus.kind} if gpus.kind else {}
        lines.append(f"  - {_flow({**keys, **known})}  # {some([host.name for host in of_type], 6)}")
    text = "\n".join(lines) + "\n"
    parse_inventory(yaml_of(target, text, verbatim=["env"]))
    return text, left_out


def _flow(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=1 << 20).strip()


def hosts_of(
    inventory: Inventory, declared: Sequence[DeclaredHost], expand: Callable[[str], Sequence[str]], folder: str
) -> tuple[tuple[Node, ...], list[str]]:
    """Every declared host that one of the inventory's types stands for, as a node of its own; and warnings.

    expand: a list of hosts in Slurm's form. folder: of the hosts' work folders. Raises UsageError for a type without a
    host.
    """
    assert inventory.engine  # noqa: S101 - the caller's
    by_name: dict[str, Node] = {}
    warnings = []
    for node in inventory.nodes:
        named = expand(node.slurm.nodelist) if node.slurm and node.slurm.nodelist else None
        found = [host for host in declared if _fits(host, node, inventory.engine.partition, named)]
        if not found:
            raise UsageError(
                f"{inventory.file}:{node.line}: node {node.name}: Slurm declares no such host",
                f"`orch init --from slurm {inventory.engine.login} -` prints the types that it declares",
            )
        if not any(host.is_up for host in found):
            states = Counter(host.state for host in found)
            warnings.append(f"{node.name}: no host of this type is up now ({some(list(states), 3)})")
        for host in found:
            note = f"declared by Slurm: {host.state}, {','.join(host.partitions)}"
            update = {
                "name": host.name,
                "kind": node.name,
                "workdir": f"{folder}/{host.name}",
                "note": node.note or note,
            }
            by_name.setdefault(host.name, node.model_copy(update=update))
    return tuple(by_name.values()), warnings


def _fits(host: DeclaredHost, node: Node, partition: str | None, named: Sequence[str] | None) -> bool:
    wanted = node.slurm
    partition = wanted.partition if wanted and wanted.partition else partition
    if (named is not None and host.name not in named) or (partition and partition not in host.partitions):
        return False
    features = wanted.constraint if wanted else None
    if features and _FEATURES.fullmatch(features) and not set(features.split("&")) <= {*host.features}:
        return False
    gres = gpu_counts(wanted.gres) if wanted and wanted.gres else (GpuCount(None, node.gpus),) if node.gpus else ()
    return all(_has(host.gpus, each) for each in gres)


def _has(gpus: Sequence[GpuCount], wanted: GpuCount) -> bool:
    by_kind: Mapping[str | None, int] = {each.kind: each.count for each in gpus}
    there = by_kind.get(wanted.kind, 0) if wanted.kind else sum(by_kind.values())
    return there >= wanted.count
