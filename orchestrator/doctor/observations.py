"""Input and output of the doctor's checks: observations of a cluster, and raw findings. Pure."""

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
"""`filtered`: no connection, though another port of that address answers. `silent`: no port answers."""


@dataclass(frozen=True)
class Host:
    """A host that answered."""

    node: Node
    facts: NodeFacts
    health: Health
    address: str | None = None
    """Listening address for a job."""
    login_s: float = 0.0
    logins_tried: int = 1
    outlives: bool | None = None
    """Whether a process outlived its SSH connection; None if not tried."""

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def trains_on_gpus(self) -> bool:
        return wants_cuda(self.node, self.facts)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs on which it would train."""
        return self.facts.gpus if self.trains_on_gpus else ()

    @property
    def ranks(self) -> int:
        return self.node.ranks or self.node.gpus or len(self.gpus) or 1


@dataclass(frozen=True)
class Pair:
    """The link from one host to another."""

    start: str
    end: str
    kind: PairKind
    words: str = ""
    opens: str = ""
    """Command that may open the other host's firewall."""
    round_trip_s: float | None = None
    bits_per_s: float | None = None
    """In a short transfer; None if not measured."""


@dataclass(frozen=True)
class Mesh:
    """The links between all hosts that took part."""

    pairs: tuple[Pair, ...]
    closed: Mapping[str, str] = field(default_factory=dict)
    """By host, why it cannot listen at its training address."""


@dataclass(frozen=True)
class Collective:
    """Result of a short all-reduce over all hosts."""

    backends: tuple[str, ...]
    """In order of trial, up to the first failure."""
    backend: str = ""
    """The failed backend."""
    failure: str = ""
    """Reason; "" if none failed."""
    guilty: tuple[str, ...] = ()
    """The host, or pair of hosts, that it needs to fail; empty if unknown."""
    job: str | None = None
    """The job that failed with all hosts."""


@dataclass(frozen=True)
class Observations:
    """unreached: by host, why it is unknown. master: remembered or elected. collective: None if not tried."""

    hosts: tuple[Host, ...]
    unreached: Mapping[str, HostError] = field(default_factory=dict)
    mesh: Mesh | None = None
    master: str | None = None
    collective: Collective | None = None
    why_no_collective: str = "without --collective"
    shared_folders: tuple[tuple[str, ...], ...] = ()
    """Groups of hosts with one work folder, found by trial."""

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    @property
    def open_pairs(self) -> list[Pair]:
        return [pair for pair in self.mesh.pairs if pair.kind == "open"] if self.mesh else []


@dataclass(frozen=True)
class RawFinding:
    """A problem found by a check. where: hosts, or start and end of a link. level: if it differs from the check's."""

    where: tuple[str, ...]
    seen: str
    remedy: str = ""
    level: Level | None = None
    is_way: bool = False


Judge = Callable[[Observations], Iterator[RawFinding]]
Applies = Callable[[Observations], str]
"""Why the check does not apply; "" if it does."""


@dataclass(frozen=True)
class Check:
    """A row of the table. causes: symptoms if the problem goes unnoticed."""

    id: str
    name: str
    level: Level
    causes: str
    judge: Judge
    applies: Applies
    when: Mapping[str, Judge] = field(default_factory=dict)
    """The parts of it that run at other moments than `orch doctor`."""
