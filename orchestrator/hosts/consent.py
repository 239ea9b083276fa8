"""What an inventory would have this very machine run, and whether its person has allowed it.

    if commands := not_allowed(home, nodes):    # "desk: activate: . ~/venv/bin/activate"
        ...                                     # ask, then allow(home, commands)

`transport: local` makes nodes of this machine, without a login in between: a file from somebody else could run anything
here at `orch up`. What its local nodes would run is therefore asked about once, and again whenever a value changes:
consent is kept as one digest a node, keyed by this $ORCH_HOME, so that no value of `env` can be read from it. A node
that names nothing but `python3`, or the Python that orch itself runs in, runs our own programs alone: nobody is asked.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from orchestrator.files import write_atomic
from orchestrator.hosts.inventory import Node
from orchestrator.owner import read_owner
from orchestrator.paths import Home


@dataclass(frozen=True)
class Command:
    """What one key of a node would run. As text it shows no value of `env`, which may be a secret."""

    node: str
    key: str
    """The inventory's name for it, for example `activate`."""
    value: str

    def __str__(self) -> str:
        return f"{self.node}: {self.key}" + ("" if self.key.startswith("env ") else f": {self.value}")


_KNOWN_PYTHONS = frozenset({"python3", sys.executable, os.path.realpath(sys.executable)})


def local_commands(nodes: Sequence[Node]) -> tuple[Command, ...]:
    """Everything that local nodes among these would run here, or run it with."""
    return tuple(command for node in nodes if node.transport == "local" for command in _commands(node))


def not_allowed(home: Home, nodes: Sequence[Node]) -> tuple[Command, ...]:
    """The same, of the nodes that their person has not allowed as they are now."""
    found = [local_commands([node]) for node in nodes]
    return tuple(command for commands in found if not _is_allowed(home, commands) for command in commands)


def allow(home: Home, commands: Sequence[Command]) -> None:
    """commands: all those of each node, as `not_allowed` gives them."""
    for name in dict.fromkeys(command.node for command in commands):
        own = [command for command in commands if command.node == name]
        write_atomic(home.allowed(_digest(home, own)), "".join(f"{one.node}: {one.key}\n" for one in own))


def _is_allowed(home: Home, commands: Sequence[Command]) -> bool:
    return not commands or home.allowed(_digest(home, commands)).exists()


def _commands(node: Node) -> list[Command]:
    keys = {"activate": node.activate, "prepare": node.prepare}
    if node.python not in _KNOWN_PYTHONS:
        keys["python"] = node.python
    # A number names no program and no library.
    variables = [name for name, value in node.env.items() if not re.fullmatch(r"[0-9.]*", value)]
    found = [Command(node.name, key, value) for key, value in keys.items() if value]
    return [*found, *(Command(node.name, f"env {name}", node.env[name]) for name in variables)]


def _digest(home: Home, commands: Sequence[Command]) -> str:
    content = json.dumps([astuple(command) for command in commands]).encode()
    return hmac.new(read_owner(home).id.encode(), content, "sha256").hexdigest()
