"""What an inventory would have this very machine run, and whether its person has allowed it.

    if commands := not_allowed(home, inventory):    # "desk: activate: . ~/venv/bin/activate"
        ...                                         # ask, then allow(home, commands)

`transport: local` makes nodes of this machine, without a login in between: a file from somebody else could run anything
here at `orch up`. What its local nodes would run is therefore asked about once, and again when that changes. A node
that names nothing but `python3`, or the Python that orch itself runs in, runs our own programs alone: nobody is asked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from orchestrator.files import write_atomic
from orchestrator.hosts.inventory import Inventory, Node
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


def local_commands(inventory: Inventory) -> tuple[Command, ...]:
    """Everything that the file's local nodes would run here, or run it with."""
    return tuple(command for node in inventory.nodes if node.transport == "local" for command in _commands(node))


def not_allowed(home: Home, inventory: Inventory) -> tuple[Command, ...]:
    """The same, where their person has not allowed them yet; else none."""
    commands = local_commands(inventory)
    return () if is_allowed(home, commands) else commands


def is_allowed(home: Home, commands: Sequence[Command]) -> bool:
    return home.allowed(_digest(commands)).exists()


def allow(home: Home, commands: Sequence[Command]) -> None:
    write_atomic(home.allowed(_digest(commands)), "".join(f"{command.node}: {command.key}\n" for command in commands))


def _commands(node: Node) -> list[Command]:
    keys = {"activate": node.activate, "prepare": node.prepare}
    if node.python not in _KNOWN_PYTHONS:
        keys["python"] = node.python
    # A number names no program and no library.
    variables = [name for name, value in node.env.items() if not re.fullmatch(r"[0-9.]*", value)]
    found = [Command(node.name, key, value) for key, value in keys.items() if value]
    return [*found, *(Command(node.name, f"env {name}", node.env[name]) for name in variables)]


def _digest(commands: Sequence[Command]) -> str:
    return hashlib.sha256(json.dumps([astuple(command) for command in commands]).encode()).hexdigest()
