"""Chooses a job's hosts (`--hosts`) and places it on them: rank numbers, addresses, interfaces, devices, GPUs. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.errors import HostError, TooFewError, UsageError
from orchestrator.hosts import checks
from orchestrator.hosts.election import Election
from orchestrator.hosts.exec import together
from orchestrator.hosts.facts import Gpu, NodeFacts, visible_gpus
from orchestrator.hosts.inventory import Node
from orchestrator.planning.job_spec import HostRange
from orchestrator.planning.launch_plan import HostChoice, LeftOut
from orchestrator.planning.request import RunRequest
from orchestrator.units import counted, one_line, some

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class PlannedNode:
    node: Node
    facts: NodeFacts
    node_rank: int
    first_rank: int
    """Global rank of local rank 0."""
    ranks: int
    address: str
    interface: str | None
    device: Device
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class Placement:
    nodes: tuple[PlannedNode, ...]
    """The master first."""
    second: str | None = None
    """Runner-up of the election; None on a single host."""

    @property
    def ranks(self) -> list[tuple[str, int]]:
        """(node, local rank) in order of global ranks."""
        return [(placed.node.name, local_rank) for placed in self.nodes for local_rank in range(placed.ranks)]


def _refuse_several_likes(nodes: Sequence[Node]) -> None:
    """Raises UsageError if hosts would exchange gradients of different networks."""
    likes = {node.name: node.paced.like if node.paced else None for node in nodes}
    if len({*likes.values()}) > 1:
        named = ", ".join(f"{name}: {like or 'the run itself'}" for name, like in likes.items())
        raise UsageError(f"paced hosts simulate different networks ({named})", "give all hosts the same `like`")


def place(nodes: Sequence[Node], facts: Mapping[str, NodeFacts], election: Election, request: RunRequest) -> Placement:
    """nodes: all with facts. Raises UsageError if a training address is unknown."""
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
    rest = [placed.node.name for placed in planned[1:]]
    second = next((placed.name for placed in election.candidates if placed.name in rest), None)
    return Placement(tuple(planned), second)


def _refuse_other_addresses(planned: Sequence[PlannedNode]) -> None:
    """Raises UsageError if Gloo would bind another address, which other hosts have, too."""
    for placed in planned:
        others = (other.facts for other in planned if other is not placed)
        problem, remedy = checks.bound_address(placed.node, placed.facts, placed.address, placed.interface, others)
        if problem:
            raise UsageError(f"{placed.node.name}: {problem}", remedy)


def _device(node: Node, facts: NodeFacts, request: RunRequest) -> Device:
    """From the run's settings, else from the inventory, else from the facts."""
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
    """Declared, else the source of a route to another host; None if unknown."""
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
    """Declared, else the interface with its address, else that of a route to another host."""
    if node.interface:
        return node.interface
    for interface in facts.interfaces:
        if addresses[node.name] in (address.partition("/")[0] for address in interface.addresses):
            return interface.name
    way = facts.way_to(addresses[other.name] for other in nodes if other is not node)
    return way.interface if way else None


# Detects paths in this machine's home folder that were meant for each host's own: a shell expands `~`, also in
# `data_dir=~/data`, before orch sees it. Pure.


def homes_of(nodes: Iterable[Node], facts: Mapping[str, NodeFacts]) -> dict[str, str]:
    """Login's home folder by node, if the work folder shows it."""
    found = {}
    for node in nodes:
        if node.name in facts and node.workdir.startswith("~/"):
            below, workdir = node.workdir.removeprefix("~").rstrip("/"), facts[node.name].workdir
            if workdir.endswith(below):
                found[node.name] = workdir.removesuffix(below)
    return found


def notes_on(request: RunRequest, own_home: str, homes: Mapping[str, str]) -> Iterator[str]:
    for key in sorted(request.chosen):
        yield from expanded_here("--set", f"{key}=", str(getattr(request.settings, key)), own_home, homes)
    for word in request.command:
        path = word.partition("=")[2] if word.startswith("-") else word
        for problem in _elsewhere(path, own_home, homes):
            yield f"{problem}; give the script a path of the hosts"


def expanded_here(option: str, key: str, path: str, own_home: str, homes: Mapping[str, str]) -> Iterator[str]:
    """For a path that hosts expand themselves. option, key: typed before it."""
    for problem in _elsewhere(path, own_home, homes):
        quoted = shlex.quote(f"{key}~{path.removeprefix(own_home)}")
        yield f"{problem}; for each host's own write {option} {quoted}, with the quotes"


def _elsewhere(path: str, own_home: str, homes: Mapping[str, str]) -> Iterator[str]:
    others = {node: home for node, home in homes.items() if home != own_home}
    if own_home != "/" and others and f"{path}/".startswith(f"{own_home}/"):
        node, home = next(iter(others.items()))
        yield f"{path} lies in your home folder here, and on {node} that is {home or '/'}"


# Chooses a job's hosts by `--hosts MIN:MAX`: how many, and which of the available hosts. Pure.


@dataclass(frozen=True)
class Worth:
    """Criterion for the choice of hosts: higher figures are better."""

    figures: Mapping[str, float]
    words: str


def check_range(wanted: HostRange, candidates: Sequence[str]) -> None:
    if wanted.min_hosts > len(candidates):
        words = f"{wanted}: {counted(len(candidates), 'host')} to choose from, and {_needed(wanted)}"
        fewer = f"{_fewer(wanted, len(candidates))}, or " if candidates else ""
        raise UsageError(words, f"{fewer}name more with --nodes, or `orch node restore` released hosts")


def those_there(wanted: HostRange, candidates: Sequence[str], away: Mapping[str, HostError]) -> list[str]:
    """The available candidates. away: why others are not. Raises TooFewError listing missing hosts."""
    there = [name for name in candidates if name not in away]
    if len(there) < wanted.min_hosts:
        missing = [away[name] for name in candidates if name in away]
        can = f"{len(there)} of {counted(len(candidates), 'host')} can take part"
        lines = [f"{wanted}: {can}, and {_needed(wanted)}; nothing was started"]
        remedy = "bring hosts back (`orch status` names them)"
        remedy += f", or {_fewer(wanted, len(there))}" if there else ""
        raise TooFewError("\n".join([*lines, *(str(error) for error in together(missing))]), remedy)
    return there


def ranked(names: Sequence[str], worth: Worth, pin: str | None) -> list[str]:
    """Best first: the pinned master, then by worth, then in the order of `names`."""
    return sorted(names, key=lambda name: (name != pin, -worth.figures.get(name, 0.0)))


def choice_of(
    wanted: HostRange, away: Mapping[str, HostError], spares: Sequence[str], candidates: Sequence[str]
) -> HostChoice:
    left_out = (LeftOut(node=name, reason=_reason(away[name])) for name in candidates if name in away)
    return HostChoice(
        min_hosts=wanted.min_hosts,
        max_hosts=wanted.max_hosts,
        candidates=tuple(candidates),
        left_out=tuple(left_out),
        spares=tuple(spares),
    )


def choice_notes(choice: HostChoice, away: Mapping[str, HostError], worth: Worth | None) -> tuple[str, ...]:
    """worth: the criterion of the choice; None if all available hosts take part."""
    gone = together([away[each.node] for each in choice.left_out])
    notes = [f"left out: {one_line(error.message)}" for error in gone]
    if worth:
        why = f"{counted(choice.max_hosts, 'host')} at most, {worth.words}"
        notes.append(f"spare: {some(choice.spares, 12)}; the job takes {why}")
    return tuple(notes)


def _needed(wanted: HostRange) -> str:
    return f"{wanted.min_hosts} {'is' if wanted.min_hosts == 1 else 'are'} needed"


def _fewer(wanted: HostRange, there: int) -> str:
    return f"--hosts {there}:{wanted.max_hosts}"


def _reason(error: HostError) -> str:
    return one_line(error.message.removeprefix(f"{error.node}: "))
