"""Hosts of an SSH configuration, ssh_config(5): from what holds for each of them to our keys. Pure; the configuration
itself is read by `transport.ssh_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.hosts import grammar
from orchestrator.hosts.forms.imported import Given, Imported, ImportedHost, Notes, node_name

_KEYS = {"hostname": "host", "user": "user", "port": "port", "proxyjump": "proxy_jump"}
_BY_ITSELF = {"identitiesonly", "hostkeyalias", "userknownhostsfile", "globalknownhostsfile"}


@dataclass(frozen=True)
class SshHost:
    name: str
    file: str
    line: int
    options: Mapping[str, Any]
    """By the keyword in small letters, as `transport.ssh_config.Alias` has them."""
    problem: str = ""


def read_ssh_hosts(file: str, found: Sequence[SshHost]) -> Imported:
    notes = Notes(file)
    hosts = tuple(_host_of(one, notes) for one in found)
    return Imported(file, hosts, tuple(notes.mistakes), notes.left_out())


def _host_of(one: SshHost, notes: Notes) -> ImportedHost:
    if one.problem:
        notes.wrong(one.line, f"Host {one.name}: {one.problem}", one.file)
    options = {key: value for key, value in one.options.items() if value is not None}
    keys = {"host": Given(options.get("hostname", one.name), one.line)}
    for option, value in options.items():
        if option == "proxycommand":
            words = f"Host {one.name}: ProxyCommand cannot be carried over; write the way as ProxyJump"
            notes.wrong(one.line, words, one.file)
        elif option == "identityfile":
            keys |= _key_file(one, [name for name in value if name.lower() != "none"], notes)
        elif option == "connecttimeout":
            keys["connect_timeout"] = Given(f"{value}s" if value.isdigit() else value, one.line)
        elif option in _KEYS and not (option == "proxyjump" and value.lower() == "none"):
            keys[_KEYS[option]] = Given(_port(value) if option == "port" else value, one.line)
        elif option in _BY_ITSELF:
            notes.drop(
                0, f"{option} of Host {one.name} is not carried over: it holds for that name, not for its address"
            )
        elif option not in _KEYS:
            notes.drop(0, f"{option} is not carried over")
    return ImportedHost(node_name(one.name), one.line, keys, one.file)


def _port(text: str) -> Any:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else text


def _key_file(one: SshHost, files: Sequence[str], notes: Notes) -> dict[str, Given]:
    for other in files[1:]:
        notes.drop(0, f"a further IdentityFile of Host {one.name} is not carried over: {grammar.show(other)}")
    return {"key_file": Given(files[0], one.line)} if files else {}
