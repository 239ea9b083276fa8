"""What a file of another tool says of hosts, in our keys: what every reader here gives, and the writer takes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import Mistake
from orchestrator.hosts import grammar

MOST_HOSTS = grammar.MOST_HOSTS
"""Of one file: what is more is a slip in a range."""


@dataclass(frozen=True)
class Given:
    """A value, and the line that says so."""

    value: Any
    line: int


@dataclass(frozen=True)
class ImportedHost:
    name: str
    """As an inventory may have it, see `node_name`."""
    line: int
    keys: Mapping[str, Given]
    """Keys of an inventory's node, `host` among them."""
    file: str = ""
    """Where it is another one than the whole's."""


@dataclass(frozen=True)
class Imported:
    file: str
    hosts: tuple[ImportedHost, ...]
    mistakes: tuple[Mistake, ...] = ()
    left_out: tuple[str, ...] = ()
    """What has no place in an inventory, a line each; never with its value."""


@dataclass
class Notes:
    """Mistakes and left-out things of a file that is being read. Of each thing the first place is kept."""

    file: str
    mistakes: list[Mistake] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def wrong(self, line: int, words: str, file: str = "") -> None:
        """file: where it is another one."""
        self.mistakes.append(Mistake(file or self.file, line, words))

    def drop(self, line: int, words: str) -> None:
        self.dropped.setdefault(words, line)

    def left_out(self) -> tuple[str, ...]:
        return tuple(f"{self.file}:{line}: {words}" if line else words for words, line in self.dropped.items())


def node_name(host: str) -> str:
    """The host itself where it can be a node's name, else the nearest to it: `2001:db8::7` as `2001-db8--7`."""
    if re.fullmatch(grammar.NAME, host):
        return host
    near = re.sub(r"[^A-Za-z0-9._-]", "-", host).lstrip("._-")[:63]
    return near or "node"
