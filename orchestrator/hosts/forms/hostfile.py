"""Hostfiles, as DeepSpeed, Open MPI, MPICH and Intel MPI read them. Pure.

gpu01 slots=4                     # DeepSpeed, Open MPI
10.0.0.2:4                        # MPICH, Intel MPI
me@gpu03 slots=4 max-slots=8
gpu04                             # four lines of it: four ranks, as batch systems write them

read_hostfile("hosts", text).hosts[0].keys["ranks"].value      # 4
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.hosts import grammar
from orchestrator.hosts.forms.imported import MOST_HOSTS, Given, Imported, ImportedHost, Notes, node_name

_RANKS = {"slots", "slot", "count", "cpu", "cpus"}
_USER = {"user", "username", "user_name"}
_DROPPED = {"max_slots", "sockets", "boards", "binding", "ifhn", "port_range"}
_HOST = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<ipv6>[^\]\s]*)\]|(?P<host>[^\s@\[\]]+?))(?::(?P<count>\d+))?")
_FORM = "write `host slots=4` or `host:4`"


def read_hostfile(file: str, text: str) -> Imported:
    notes = Notes(file)
    hosts: dict[str, ImportedHost] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        host = _host_of(words, number, notes) if words else None
        if host:
            _add(hosts, host, notes)
    if len(hosts) > MOST_HOSTS:
        notes.wrong(0, f"names more than {MOST_HOSTS} hosts; is it a hostfile?")
    if not hosts and not notes.mistakes:
        notes.wrong(0, f"names no host; {_FORM}, one a line")
    return Imported(file, tuple(hosts.values()), tuple(notes.mistakes), notes.left_out())


def _host_of(words: Sequence[str], line: int, notes: Notes) -> ImportedHost | None:
    first, *options = words
    match = None if first[0] in "^+" else _HOST.fullmatch(_bracketed(first))
    if not match:
        notes.wrong(line, f"{grammar.show(first)} is not a host; {_FORM}")
        return None
    host = match["ipv6"] or match["host"] or ""
    keys = {"host": Given(host, line)}
    if match["user"]:
        keys["user"] = Given(match["user"], line)
    if match["count"]:
        _ranks(keys, match["count"], line, notes)
    for option in options:
        _option(keys, option, line, notes)
    return ImportedHost(node_name(host), line, keys)


def _bracketed(word: str) -> str:
    """A bare IPv6 address in brackets: what stands behind its last colon is no number of ranks."""
    user, at, host = word.rpartition("@")
    return f"{user}{at}[{host}]" if host.count(":") > 1 and "[" not in host else word


def _option(keys: dict[str, Given], word: str, line: int, notes: Notes) -> None:
    key, equals, value = word.partition("=")
    plain = key.lower().replace("-", "_")
    if not equals or not value:
        notes.wrong(line, f"{grammar.show(word)} is no `option=value`; {_FORM}, one host a line")
    elif plain in _RANKS:
        _ranks(keys, value, line, notes)
    elif plain in _USER:
        keys["user"] = Given(value, line)
    elif plain in _DROPPED:
        notes.drop(line, f"{key} is not carried over")
    else:
        notes.wrong(line, f"unknown option {grammar.show(key)}; known are slots, user and max-slots")


def _ranks(keys: dict[str, Given], text: str, line: int, notes: Notes) -> None:
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= 256:
        notes.wrong(line, f"slots: {grammar.show(text)} must be a whole number from 1 to 256")
    elif "ranks" in keys:
        notes.wrong(line, "the number of slots is given twice; keep one")
    else:
        keys["ranks"] = Given(int(text), line)


def _add(hosts: dict[str, ImportedHost], host: ImportedHost, notes: Notes) -> None:
    """A repeated host gets one more rank, unless a line gives a number."""
    known = hosts.setdefault(host.name, host)
    if known is host:
        return
    counted = known.keys.get("ranks", Given(1, 0))
    if "ranks" in host.keys or counted.line == known.line:
        notes.wrong(host.line, f"{host.name} is already on line {known.line}; write it once, with all its slots")
    else:
        more = Given(counted.value + 1, host.line)
        hosts[host.name] = ImportedHost(known.name, known.line, {**known.keys, "ranks": more})


# Hosts of an SSH configuration, ssh_config(5), from their options (read by `transport.ssh_config`) to our keys. Pure.

_KEYS = {"hostname": "host", "user": "user", "port": "port", "proxyjump": "proxy_jump"}
_BY_ITSELF = {"identitiesonly", "hostkeyalias", "userknownhostsfile", "globalknownhostsfile"}


@dataclass(frozen=True)
class SshHost:
    name: str
    file: str
    line: int
    options: Mapping[str, Any]
    """Keys in lower case, as in `transport.ssh_config.Alias`."""
    problem: str = ""


def read_ssh_hosts(file: str, found: Sequence[SshHost]) -> Imported:
    notes = Notes(file)
    hosts = tuple(_ssh_config_host_of(one, notes) for one in found)
    return Imported(file, hosts, tuple(notes.mistakes), notes.left_out())


def _ssh_config_host_of(one: SshHost, notes: Notes) -> ImportedHost:
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
