"""Imagined clusters, from `500xA2000,500xV100` to a forecast's scene. Pure.

groups = parse_groups("500xA2000,2x4xA16")     500 hosts of one A2000, two hosts of four A16
scene = imagine(groups, layers, bandwidth_bps=2.5e9, settings=settings)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import UsageError
from orchestrator.forecast.advice import Scene
from orchestrator.forecast.gpu_catalogue import estimate
from orchestrator.forecast.layers import Layer
from orchestrator.forecast.links import GOODPUT, NCCL, LinkCosts, Site
from orchestrator.forecast.step import HostSpeed, Workload
from orchestrator.hosts.cards import Card, all_cards, find_card
from orchestrator.hosts.inventory import Inventory
from trainer.shared.settings import Settings

MOST_RANKS = 20_000
_GROUP = re.compile(r"(?P<hosts>\d{1,6})x(?:(?P<gpus>\d{1,3})x)?(?P<gpu>[A-Za-z][A-Za-z0-9 .-]*|\d{4}[A-Za-z ]*)")


@dataclass(frozen=True)
class HostGroup:
    """gpus: per host."""

    hosts: int
    gpus: int
    gpu: Card

    @property
    def kind(self) -> str:
        """A host of the group, for `parse_groups`."""
        return f"{self.gpus}x{self.gpu.name}" if self.gpus > 1 else self.gpu.name

    @property
    def words(self) -> str:
        each = f" of {self.gpus}" if self.gpus > 1 else ""
        return f"{self.hosts} host{'s' if self.hosts > 1 else ''}{each} {self.gpu.name}"


def is_imagined(text: str) -> bool:
    """`500xA2000,...`, not names of nodes."""
    return bool(re.match(r"\s*\d+x", text))


def parse_groups(text: str) -> tuple[HostGroup, ...]:
    """Raises UsageError."""
    groups = []
    for item in text.split(","):
        match = _GROUP.fullmatch(item.strip())
        if not match or not int(match["hosts"]) or (match["gpus"] and not int(match["gpus"])):
            raise UsageError(
                f"{item.strip()!r} is no group of hosts", "write HOSTSxGPU or HOSTSxGPUSxGPU, like 500xA2000,2x4xA16"
            )
        gpu = find_card(match["gpu"])
        if gpu is None:
            known = ", ".join(each.name for each in all_cards().cards)
            raise UsageError(f"{match['gpu']} is not in the catalogue", f"it has {known}")
        groups.append(HostGroup(int(match["hosts"]), int(match["gpus"] or 1), gpu))
    ranks = sum(group.hosts * group.gpus for group in groups)
    if ranks > MOST_RANKS:
        raise UsageError(f"{ranks} ranks are more than a plan considers", f"at most {MOST_RANKS}")
    return tuple(groups)


def groups_of_types(inventory: Inventory, counts: Mapping[str, int]) -> tuple[tuple[HostGroup, ...], float | None]:
    """Types of a Slurm cluster, and the slowest of their declared links. counts: hosts by type. Raises UsageError."""
    groups, links = [], []
    for name, hosts in counts.items():
        node = inventory.node(name)
        card = find_card(node.gpu) if node.gpu else None
        if card is None:
            raise UsageError(
                f"{inventory.file}:{node.line}: type {name}: its `gpu:` is not in the catalogue of cards",
                "`orch profile` measures its speed",
            )
        groups.append(HostGroup(hosts, node.gpus or 1, card))
        links += [node.bandwidth_bps] if node.bandwidth_bps else []
    return tuple(groups), min(links, default=None)


def imagine(groups: Sequence[HostGroup], layers: tuple[Layer, ...], bandwidth_bps: float, settings: Settings) -> Scene:
    """bandwidth_bps: of every host's link, as declared. Raises UsageError if a GPU is too small or has no `amp`."""
    hosts, sites = list[HostSpeed](), list[Site]()
    bps = GOODPUT * bandwidth_bps
    for group in groups:
        found = estimate(group.gpu, layers, settings.amp, settings.states)
        speeds = (found.speed,) * group.gpus
        if speeds[0].cap == 0:
            raise UsageError(
                f"not one sample fits into the {group.gpu.memory_gib:g} GiB of an {group.gpu.name}",
                "take a GPU with more memory, or another --exp",
            )
        for _ in range(group.hosts):
            name = f"{group.gpu.name}-{len(hosts)}"
            hosts.append(HostSpeed(name, speeds, group.kind, launch_ms=found.launched_ms(settings)))
            sites.append(Site(name, group.gpus, bps, bps))
    costs = NCCL.on_gpus(min(group.gpu.gb_per_s for group in groups))
    return Scene(Workload(layers, settings.batch), tuple(hosts), LinkCosts(tuple(sites), costs))
