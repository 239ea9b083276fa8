"""A cluster as it is remembered: its hosts, their facts and environments, its master."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, Field

from orchestrator.errors import HostError, UsageError
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.inventory import Node
from orchestrator.hosts.masking import mask, masked_env
from orchestrator.hosts.node_names import names_in
from orchestrator.record import SCHEMA, Record


class Problem(Record):
    """What keeps a node from taking part: a HostError's words."""

    message: str
    remedy: str = ""
    at: str = ""

    def as_error(self, node: str) -> HostError:
        error = HostError(node, self.message, self.remedy)
        error.at = self.at
        return error


class Venv(Record):
    """An environment that `orch setup` made: its Python, and the one of the inventory that it stands in for."""

    python: str
    base_python: str
    torch: str
    torchvision: str


class Cluster(Record):
    """A remembered cluster."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore", populate_by_name=True)

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    name: str
    file: str
    """The inventory file it came from."""
    nodes: tuple[Node, ...]
    added: dict[str, str] = Field(default_factory=dict)
    """When each node was first seen, ISO 8601."""
    probed: dict[str, str] = Field(default_factory=dict)
    """When each node was last looked at for its facts, with or without success, ISO 8601."""
    removed: tuple[str, ...] = ()
    """The names of the file's nodes that `orch node remove` took out."""
    extra: tuple[Node, ...] = ()
    """Nodes that the file does not have: `orch node add`."""
    extra_keys: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By such a node, the keys that were given; all else it has from `defaults`."""
    defaults: dict[str, Any] = Field(default_factory=dict)
    """The file's `defaults`, as it writes them."""
    released: tuple[str, ...] = ()
    """Kept, but given no job until restored."""
    venvs: dict[str, Venv] = Field(default_factory=dict)
    """Nodes whose Python is one that `orch setup` made; `nodes` names it already."""
    master_pin: str | None = None
    """A person's word (`orch master`): it beats the election."""
    master: str | None = None
    master_reason: str = ""
    facts: dict[str, NodeFacts] = Field(default_factory=dict)
    problems: dict[str, Problem] = Field(default_factory=dict)
    """Nodes that could not be used at the last `up`, and why."""

    def node(self, name: str) -> Node:
        """Raises UsageError naming the nodes there are."""
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes)
        raise UsageError(f"{name}: no such node in cluster {self.name}", f"its nodes: {known}")

    def names(self, listed: str | Sequence[str] | None) -> list[str]:
        """The nodes that --nodes means, see `node_names`; a plain name may be of none. Raises UsageError."""
        listed = listed if isinstance(listed, str) or listed is None else ",".join(listed)
        return names_in(listed or None, [node.name for node in self.nodes], f"cluster {self.name}")

    def chosen(self, only: Sequence[str]) -> list[Node]:
        """The nodes named, else all that are not released. Raises UsageError for one that is not there."""
        return [self.node(name) for name in dict.fromkeys(only)] or list(self.active())

    def with_venvs(self, venvs: Mapping[str, Venv]) -> Cluster:
        """With these in place of the environments known; each node's Python is the one that then counts."""
        base = {name: venv.base_python for name, venv in self.venvs.items()}
        python = {**base, **{name: venv.python for name, venv in venvs.items()}}
        nodes = tuple(node.model_copy(update={"python": python.get(node.name, node.python)}) for node in self.nodes)
        return self.model_copy(update={"nodes": nodes, "venvs": dict(venvs)})

    def masked(self) -> Cluster:
        """The form that is kept: without the values of `env` that may be secrets, nor `prepare`; see
        `file_again.with_secrets`. `activate` stays: each command needs it.
        """
        update = {part: tuple(_masked(node) for node in getattr(self, part)) for part in ("nodes", "extra")}
        env, prepare = masked_env(self.defaults.get("env", {})), mask(self.defaults.get("prepare"))
        secret = {key: value for key, value in (("env", env), ("prepare", prepare)) if value}
        return self.model_copy(update={**update, "defaults": {**self.defaults, **secret}})

    def active(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.name not in self.released)


def _masked(node: Node) -> Node:
    return node.model_copy(update={"env": masked_env(node.env), "prepare": mask(node.prepare)})
