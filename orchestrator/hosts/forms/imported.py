"""Hosts read from another tool's file, with our inventory's keys: the readers' output and the writer's input. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import Mistake
from orchestrator.hosts import grammar

MOST_HOSTS = grammar.MOST_HOSTS
"""Per file; more is a slip in a range."""


@dataclass(frozen=True)
class Given:
    """line: the place of the value in the file."""

    value: Any
    line: int


@dataclass(frozen=True)
class ImportedHost:
    name: str
    """Valid in an inventory, see `node_name`."""
    line: int
    keys: Mapping[str, Given]
    """Inventory keys, including `host`."""
    file: str = ""
    """Set if it differs from `Imported.file`."""


@dataclass(frozen=True)
class Imported:
    file: str
    hosts: tuple[ImportedHost, ...]
    mistakes: tuple[Mistake, ...] = ()
    left_out: tuple[str, ...] = ()
    """Settings without a place in an inventory, one line each, never with the value."""


@dataclass
class Notes:
    """Mistakes and dropped settings of a file; a repeated setting keeps its first line."""

    file: str
    mistakes: list[Mistake] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def wrong(self, line: int, words: str, file: str = "") -> None:
        """file: if it is another file."""
        self.mistakes.append(Mistake(file or self.file, line, words))

    def drop(self, line: int, words: str) -> None:
        self.dropped.setdefault(words, line)

    def left_out(self) -> tuple[str, ...]:
        return tuple(f"{self.file}:{line}: {words}" if line else words for words, line in self.dropped.items())


def node_name(host: str) -> str:
    """The host if it is a valid node name, else the nearest valid one: `2001:db8::7` as `2001-db8--7`."""
    if re.fullmatch(grammar.NAME, host):
        return host
    near = re.sub(r"[^A-Za-z0-9._-]", "-", host).lstrip("._-")[:63]
    return near or "node"
