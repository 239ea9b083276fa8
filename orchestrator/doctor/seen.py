"""What was seen of a cluster, as the checks judge it, and what a check says of it: frozen values. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.errors import HostError
from orchestrator.hosts.checks import wants_cuda
from orchestrator.hosts.facts import Gpu, Health, NodeFacts
from orchestrator.hosts.inventory import Node

Level = Literal["block", "warn"]
PairKind = Literal["open", "silent", "filtered", "refused", "unreachable", "mute", "small only", "hung up", "not tried"]
"""`filtered`: no connection, though another port of that address answers. `silent`: nothing of it does."""


@dataclass(frozen=True)
class Host:
    """One host that answered."""

    node: Node
    facts: NodeFacts
    health: Health
    address: str | None = None
    """Where a job would have it listen."""
    login_s: float = 0.0
    logins_tried: int = 1
    outlives: bool | None = None
    """Whether a process went on when its SSH connection had ended; None where that was not tried."""

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def trains_on_gpus(self) -> bool:
        return wants_cuda(self.node, self.facts)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Those on which it would train."""
        return self.facts.gpus if self.trains_on_gpus else ()

    @property
    def ranks(self) -> int:
        return self.node.ranks or self.node.gpus or len(self.gpus) or 1


@dataclass(frozen=True)
class Pair:
    """The way from one host to another."""

    start: str
    end: str
    kind: PairKind
    words: str = ""
    opens: str = ""
    """The line for the other host's firewall that may help."""
    round_trip_s: float | None = None
    bits_per_s: float | None = None
    """Of a short transfer; None where none was made."""


@dataclass(frozen=True)
class Mesh:
    """The ways between all hosts that took part."""

    pairs: tuple[Pair, ...]
    closed: Mapping[str, str] = field(default_factory=dict)
    """By host, why it cannot listen at its training address."""


@dataclass(frozen=True)
class Collective:
    """What became of a short all-reduce over all hosts."""

    backends: tuple[str, ...]
    """Tried in this order, up to the first that fails."""
    backend: str = ""
    """The one that failed."""
    failure: str = ""
    """Why, in words; "" where none failed."""
    guilty: tuple[str, ...] = ()
    """The host without which it does not fail, or the pair with which it does; empty where that is not known."""
    job: str | None = None
    """The one that failed with all hosts."""


@dataclass(frozen=True)
class Seen:
    """All that was looked at. unreached: why nothing is known of a host. master: who would be it. collective: None
    where it was not tried, and why_no_collective.
    """

    hosts: tuple[Host, ...]
    unreached: Mapping[str, HostError] = field(default_factory=dict)
    mesh: Mesh | None = None
    master: str | None = None
    collective: Collective | None = None
    why_no_collective: str = "without --collective"
    shared_folders: tuple[tuple[str, ...], ...] = ()
    """Hosts that have one work folder, as a trial has shown."""

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    @property
    def open_pairs(self) -> list[Pair]:
        return [pair for pair in self.mesh.pairs if pair.kind == "open"] if self.mesh else []


@dataclass(frozen=True)
class Sight:
    """What a check found wrong. where: hosts; of a way its start and its end. level: where it is not the check's."""

    where: tuple[str, ...]
    seen: str
    remedy: str = ""
    level: Level | None = None
    is_way: bool = False


Judge = Callable[[Seen], Iterator[Sight]]
Applies = Callable[[Seen], str]
"""Why there is nothing to judge; "" where there is."""


@dataclass(frozen=True)
class Check:
    """One row of the table. causes: what comes of it where nobody looks."""

    id: str
    name: str
    level: Level
    causes: str
    judge: Judge
    applies: Applies
    when: Mapping[str, Judge] = field(default_factory=dict)
    """The parts of it that are judged at other moments than `orch doctor`."""
