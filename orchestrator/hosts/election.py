"""Elects the master of a cluster, with the reason. Pure.

    elect(inventory.nodes, facts).reason
    # "v100: same bandwidth as a2000 (2.5Gbps), more GPU memory (16.0GiB against 12.0GiB)"

A pinned usable node wins; else more bandwidth, more memory of the largest GPU, more GPUs, lowest address, name. The
inventory's bandwidth and GPU count precede the probe's. Memory is rounded up to a size that is sold, since drivers
report less.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.errors import HostError, HostsError
from orchestrator.hosts.cards import find_card
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.inventory import Node
from orchestrator.units import format_bandwidth, format_bytes

GIB = 1 << 30
# Memory sizes of cards, in GiB. Inline ECC takes a sixteenth off the driver's figure.
SOLD_GIB = (1, 2, 3, 4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288)


@dataclass(frozen=True)
class Candidate:
    name: str
    usable: bool
    why_not: str | None
    bandwidth_bps: float
    """Declared, else of the training interface, else 0."""
    gpu_memory_bytes: int
    """Largest GPU, as sold; 0 without a GPU."""
    gpus: int
    address: str | None
    position: int | None = None
    """1 for the master; None for an unusable node."""


@dataclass(frozen=True)
class Election:
    master: str
    reason: str
    candidates: tuple[Candidate, ...]
    """By rank; unusable nodes last, by name."""


def elect(nodes: Sequence[Node], facts: Mapping[str, NodeFacts | HostError]) -> Election:
    """A node with a HostError or without an entry is unusable. Raises HostsError if all are."""
    errors = {node.name: error for node in nodes if isinstance(error := _answer(node, facts), HostError)}
    seen = [_candidate(node, _answer(node, facts)) for node in nodes]
    pinned = {node.name for node in nodes if node.master}
    usable = sorted(
        (candidate for candidate in seen if candidate.usable),
        key=lambda candidate: (candidate.name not in pinned, _rank(candidate)),
    )
    if not usable:
        raise HostsError(list(errors.values()))
    ranked = [replace(candidate, position=position) for position, candidate in enumerate(usable, 1)]
    others = sorted((candidate for candidate in seen if not candidate.usable), key=lambda candidate: candidate.name)
    return Election(ranked[0].name, _reason(ranked, pinned), (*ranked, *others))


def _answer(node: Node, facts: Mapping[str, NodeFacts | HostError]) -> NodeFacts | HostError:
    return facts.get(node.name) or HostError(node.name, "not looked at yet", "`orch up` looks at every host")


def _candidate(node: Node, answer: NodeFacts | HostError) -> Candidate:
    facts = None if isinstance(answer, HostError) else answer
    return Candidate(
        name=node.name,
        usable=facts is not None,
        why_not=str(answer) if isinstance(answer, HostError) else None,
        bandwidth_bps=node.bandwidth_bps or _link_bps(node, facts),
        gpu_memory_bytes=_gpu_memory_bytes(node, facts),
        gpus=node.gpus if node.gpus is not None else len(_real_gpus(node, facts)) or int(bool(node.gpu)),
        address=_address(node, facts),
    )


def _rank(candidate: Candidate) -> tuple[float, int, int, tuple[int, int], str]:
    return (
        -candidate.bandwidth_bps,
        -candidate.gpu_memory_bytes,
        -candidate.gpus,
        _address_order(candidate.address),
        candidate.name,
    )


# ---- why ------------------------------------------------------------------------------------------------------


def _reason(ranked: Sequence[Candidate], pinned: set[str]) -> str:
    master = ranked[0]
    if master.name in pinned:
        return f"{master.name}: pinned as master"
    if len(ranked) == 1:
        reason = f"{master.name}: the only usable host"
    else:
        reason = f"{master.name}: {_comparison(master, ranked[1])}"
    left_out = f" (pinned, but unusable: {', '.join(sorted(pinned))})" if pinned else ""
    return reason + left_out


def _comparison(master: Candidate, second: Candidate) -> str:
    figures = (
        ("bandwidth", "same", master.bandwidth_bps, second.bandwidth_bps, _bandwidth),
        ("GPU memory", "same", master.gpu_memory_bytes, second.gpu_memory_bytes, _memory),
        ("GPUs", "as many", master.gpus, second.gpus, str),
    )
    parts: list[str] = []
    for name, equal, own, other, show in figures:
        if own != other:
            than = "" if parts else f" than {second.name}"
            return ", ".join([*parts, f"more {name}{than} ({show(own)} against {show(other)})"])
        if own:
            parts.append(f"{equal} {name}{'' if parts else f' as {second.name}'} ({show(own)})")
    if _address_order(master.address) != _address_order(second.address):
        than = "" if parts else f" than {second.name}"
        return ", ".join([*parts, f"lower address{than} ({master.address} against {second.address or 'none known'})"])
    return ", ".join([*parts, "first by name" if parts else f"equal to {second.name}, first by name"])


def _bandwidth(bits_per_s: float) -> str:
    return format_bandwidth(bits_per_s) if bits_per_s else "unknown"


def _memory(count: float) -> str:
    return format_bytes(count) if count else "none"


# ---- figures --------------------------------------------------------------------------------------------------


def _link_bps(node: Node, facts: NodeFacts | None) -> float:
    link = facts.training_interface(node.interface, node.address) if facts else None
    return (link.speed_bps or 0.0) if link else 0.0


def _real_gpus(node: Node, facts: NodeFacts | None) -> tuple[int, ...]:
    if not facts or node.paced or node.device == "cpu":
        return ()
    return tuple(gpu.memory_bytes for gpu in facts.gpus)


def _gpu_memory_bytes(node: Node, facts: NodeFacts | None) -> int:
    if found := max(_real_gpus(node, facts), default=0):
        return _as_sold(found)
    if node.paced and node.paced.memory_bytes:
        return _as_sold(node.paced.memory_bytes)
    return _of_label(node.gpu or "")


def _as_sold(count: int) -> int:
    """The smallest sold size that holds this; whole GiB above the largest."""
    whole = -(-count // GIB)
    return next((size for size in SOLD_GIB if size >= whole), whole) * GIB


def _of_label(label: str) -> int:
    """Memory in or implied by a label, else 0; vendors write GB and mean GiB."""
    if named := re.search(r"(\d{1,4})\s*Gi?B\b", label, re.IGNORECASE):
        return int(named[1]) * GIB
    card = find_card(label)
    return round(card.memory_gib) * GIB if card else 0


def _address(node: Node, facts: NodeFacts | None) -> str | None:
    """Declared, else the source of the first route, else a numeric SSH host."""
    source = facts.routes[0].source if facts and facts.routes else None
    for text in (node.address, source, node.host):
        if text and _numeric(text):
            return text
    return None


def _numeric(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _address_order(address: str | None) -> tuple[int, int]:
    """IPv4 before IPv6; a missing address last."""
    if address is None:
        return (7, 0)
    parsed = ipaddress.ip_address(address)
    return (parsed.version, int(parsed))
