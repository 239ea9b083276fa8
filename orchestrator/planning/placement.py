"""Which host of a job does what: its rank numbers, training address, interface, device and GPUs. Pure.

placement = place(nodes, facts, election, request)
placement.nodes[0].node.name, placement.nodes[0].ranks  the master; how many ranks it has
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.errors import UsageError
from orchestrator.hosts import checks
from orchestrator.hosts.election import Election
from orchestrator.hosts.facts import Gpu, NodeFacts, visible_gpus
from orchestrator.hosts.inventory import Node
from orchestrator.planning.request import RunRequest

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class PlannedNode:
    """What one host does in a job."""

    node: Node
    facts: NodeFacts
    node_rank: int
    first_rank: int
    """The global rank of its local rank 0."""
    ranks: int
    address: str
    """Numeric training address, without prefix length."""
    interface: str | None
    device: Device
    gpus: tuple[Gpu, ...]
    """Those of its ranks."""


@dataclass(frozen=True)
class Placement:
    """Which hosts take part in a job, and how."""

    nodes: tuple[PlannedNode, ...]
    """In node-rank order, the master first."""
    second: str | None = None
    """Who would be the master without the present one; None where it is alone."""

    @property
    def ranks(self) -> list[tuple[str, int]]:
        """(node, local rank) of each rank, in the order of their global ranks."""
        return [(one.node.name, local_rank) for one in self.nodes for local_rank in range(one.ranks)]


def _refuse_several_likes(nodes: Sequence[Node]) -> None:
    """Raises UsageError where hosts would exchange gradients of different networks."""
    likes = {node.name: node.paced.like if node.paced else None for node in nodes}
    if len({*likes.values()}) > 1:
        named = ", ".join(f"{name}: {like or 'the run itself'}" for name, like in likes.items())
        raise UsageError(f"paced hosts stand in for different networks ({named})", "give all hosts the same `like`")


def place(nodes: Sequence[Node], facts: Mapping[str, NodeFacts], election: Election, request: RunRequest) -> Placement:
    """nodes: those that take part, all with facts. Raises UsageError where no training address can be found."""
    _refuse_several_likes(nodes)
    ordered = sorted(nodes, key=lambda node: node.name != election.master)
    addresses = {node.name: _address(node, facts[node.name], ordered) for node in ordered}
    planned, first_rank = list[PlannedNode](), 0
    for node_rank, node in enumerate(ordered):
        own = facts[node.name]
        device = _device(node, own, request)
        gpus = visible_gpus(node.name, own, node.env) if device == "cuda" else ()
        ranks = _ranks(node, gpus, request)
        planned.append(
            PlannedNode(
                node=node,
                facts=own,
                node_rank=node_rank,
                first_rank=first_rank,
                ranks=ranks,
                address=addresses[node.name],
                interface=_interface(node, own, ordered, addresses),
                device=device,
                gpus=gpus[: node.gpus if request.is_one_process else ranks],
            )
        )
        first_rank += ranks
    _refuse_other_addresses(planned)
    rest = [one.node.name for one in planned[1:]]
    second = next((one.name for one in election.candidates if one.name in rest), None)
    return Placement(tuple(planned), second)


def _refuse_other_addresses(planned: Sequence[PlannedNode]) -> None:
    """Raises UsageError if Gloo would bind an address that is not the planned one, and that other hosts have, too."""
    for one in planned:
        others = [other.facts for other in planned if other is not one]
        problem, remedy = checks.bound_address(one.node, one.facts, one.address, one.interface, others)
        if problem:
            raise UsageError(f"{one.node.name}: {problem}", remedy)


def _device(node: Node, facts: NodeFacts, request: RunRequest) -> Device:
    """The person's own word for this run, else the inventory's, else what was found."""
    if request.settings and "device" in request.chosen and request.settings.device != "auto":
        return "cuda" if request.settings.device == "cuda" else "cpu"
    if node.device != "auto":
        return node.device
    return "cuda" if facts.gpus and not node.paced else "cpu"


def _ranks(node: Node, gpus: Sequence[Gpu], request: RunRequest) -> int:
    if request.is_one_process:
        return node.ranks or 1
    return node.ranks or node.gpus or len(gpus) or 1


def training_address(node: Node, facts: NodeFacts, nodes: Sequence[Node]) -> str | None:
    """Declared, else the source of this host's own route to one of the others; None where neither is known."""
    if node.address:
        return node.address
    if way := facts.way_to(other.address or other.host for other in nodes if other is not node):
        return way.source
    return "127.0.0.1" if len(nodes) == 1 or node.transport == "local" else None


def _address(node: Node, facts: NodeFacts, nodes: Sequence[Node]) -> str:
    if address := training_address(node, facts, nodes):
        return address
    raise UsageError(
        f"{node.name}: its training address is unknown (no route to the other hosts was found)",
        f"set `address:` for {node.name} in the inventory",
    )


def _interface(node: Node, facts: NodeFacts, nodes: Sequence[Node], addresses: Mapping[str, str]) -> str | None:
    """The interface that carries this host's route to the master; on the master, the one that has its address."""
    if node.interface:
        return node.interface
    for interface in facts.interfaces:
        if addresses[node.name] in (address.partition("/")[0] for address in interface.addresses):
            return interface.name
    way = facts.way_to(addresses[other.name] for other in nodes if other is not node)
    return way.interface if way else None


# Whether a path was written for this machine's home folder where each host's own was meant. Pure.
#
# A shell expands `~` before orch sees it, also in `data_dir=~/data`; what arrives here is `data_dir=/home/me/data`.


def homes_of(nodes: Iterable[Node], facts: Mapping[str, NodeFacts]) -> dict[str, str]:
    """By node, its login's home folder, as far as the work folder shows it."""
    found = {}
    for node in nodes:
        if node.name in facts and node.workdir.startswith("~/"):
            below, workdir = node.workdir.removeprefix("~").rstrip("/"), facts[node.name].workdir
            if workdir.endswith(below):
                found[node.name] = workdir.removesuffix(below)
    return found


def notes_on(request: RunRequest, own_home: str, homes: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each setting or script argument that names this machine's home folder."""
    for key in sorted(request.chosen):
        yield from expanded_here("--set", f"{key}=", str(getattr(request.settings, key)), own_home, homes)
    for word in request.command:
        path = word.partition("=")[2] if word.startswith("-") else word
        for problem in _elsewhere(path, own_home, homes):
            yield f"{problem}; give the script a path of the hosts"


def expanded_here(option: str, key: str, path: str, own_home: str, homes: Mapping[str, str]) -> Iterator[str]:
    """The same for one path that a host would expand itself. option, key: what is typed before it."""
    for problem in _elsewhere(path, own_home, homes):
        quoted = shlex.quote(f"{key}~{path.removeprefix(own_home)}")
        yield f"{problem}; for each host's own write {option} {quoted}, with the quotes"


def _elsewhere(path: str, own_home: str, homes: Mapping[str, str]) -> Iterator[str]:
    others = {node: home for node, home in homes.items() if home != own_home}
    if own_home != "/" and others and f"{path}/".startswith(f"{own_home}/"):
        node, home = next(iter(others.items()))
        yield f"{path} lies in your home folder here, and on {node} that is {home or '/'}"
