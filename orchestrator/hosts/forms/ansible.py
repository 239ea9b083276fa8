"""Reads hosts from the JSON of `ansible-inventory --list`, which covers all of Ansible's inventory sources. Pure.

read_ansible("hosts.ini", json.loads(printed)).hosts[0].keys["user"].value      # "me"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.hosts import grammar
from orchestrator.hosts.forms.imported import MOST_HOSTS, Given, Imported, ImportedHost, Notes, node_name

_KEYS = {
    "ansible_host": "host",
    "ansible_ssh_host": "host",
    "ansible_port": "port",
    "ansible_ssh_port": "port",
    "ansible_user": "user",
    "ansible_ssh_user": "user",
    "ansible_ssh_private_key_file": "key_file",
    "ansible_private_key_file": "key_file",
    "ansible_python_interpreter": "python",
    "ansible_ssh_common_args": "proxy_jump",
    "ansible_connection": "transport",
    "orch_ranks": "ranks",
}
"""An older name of a variable stands behind the newer one, which wins."""
_SECRET = re.compile(r"pass|secret|token|vault|credential|api_?key|private_?key$", re.IGNORECASE)
_JUMP = re.compile(r"""\s*(?:-J\s*|-o\s*["']?ProxyJump[=\s]\s*)([^\s"']+)["']?\s*""")
_BY_SSH = {"ssh", "smart", "paramiko", "paramiko_ssh", "libssh"}


def read_ansible(file: str, listing: Any) -> Imported:
    """listing: the document that was printed."""
    notes, variables = Notes(file), _variables(listing)
    if variables is None:
        notes.wrong(0, "is not what `ansible-inventory --list` prints")
    elif not variables:
        notes.wrong(0, "names no host")
    elif len(variables) > MOST_HOSTS:
        notes.wrong(0, f"names more than {MOST_HOSTS} hosts")
        variables = None
    hosts = [ImportedHost(node_name(name), 0, _keys_of(name, own, notes)) for name, own in (variables or {}).items()]
    return Imported(file, tuple(hosts), tuple(notes.mistakes), notes.left_out())


def _variables(listing: Any) -> dict[str, Mapping[str, Any]] | None:
    """By host, in the order in which the inventory names them. A host without variables stands in its groups only."""
    try:
        found = {name: own for name, own in listing["_meta"]["hostvars"].items() if isinstance(own, dict)}
        groups = {name: group for name, group in listing.items() if name != "_meta"}
        waiting, hosts = ["all", *groups][::-1], list[str]()
        while waiting:  # Ansible lists groups by name, and the children of each in their order
            group = groups.pop(waiting.pop(), {})
            hosts += _names(group.get("hosts", []))
            waiting += reversed(_names(group.get("children", [])))
        return {name: found.get(name, {}) for name in dict.fromkeys([*hosts, *found])}
    except (TypeError, KeyError, AttributeError):
        return None


def _names(listed: Any) -> list[str]:
    """Raises TypeError for anything else."""
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise TypeError(listed)
    return listed


def _keys_of(host: str, variables: Mapping[str, Any], notes: Notes) -> dict[str, Given]:
    """Keys of a node; mistakes and dropped variables go to the notes."""
    keys = {"host": Given(host, 0)}
    for name in variables.keys() - _KEYS.keys():
        notes.drop(0, _left_out(name))
    for name, key in _KEYS.items():
        value = variables.get(name)
        if value is None or (key in keys and key != "host"):
            continue
        if isinstance(value, dict) and "__ansible_vault" in value:
            notes.wrong(0, f"{host}: {name} is encrypted by Ansible Vault; write the plain value")
        elif isinstance(value, str) and ("{{" in value or "{%" in value):
            notes.wrong(
                0, f"{host}: {name} is a Jinja expression, which Ansible has not computed; write the plain value"
            )
        elif (found := _CONVERT.get(key, _as_it_is)(value, notes)) is not None:
            keys[key] = Given(found, 0)
    return keys


def _left_out(name: str) -> str:
    shown = name if re.fullmatch(r"\w{1,60}", name) else grammar.show(name)
    return f"{shown} is {'a secret, and ' if _SECRET.search(name) else ''}not carried over"


def _as_it_is(value: Any, notes: Notes) -> Any:
    return value


def _number(value: Any, notes: Notes) -> Any:
    return int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,6}", value) else value


def _python(value: Any, notes: Notes) -> Any:
    if not isinstance(value, str):
        return value
    if value.startswith("auto"):
        notes.drop(0, f"ansible_python_interpreter={value[:20]!r} is not carried over: orch takes `python3`")
        return None
    return re.sub(r"^/usr/bin/env\s+(?=[\w.-]+$)", "", value)


def _proxy_jump(value: Any, notes: Notes) -> Any:
    match = _JUMP.fullmatch(value) if isinstance(value, str) else None
    if not match:
        notes.drop(0, "ansible_ssh_common_args is not carried over: of its options only `-J HOST` has a place")
    return match and match[1]


def _transport(value: Any, notes: Notes) -> Any:
    if value == "local":
        return "local"
    if not isinstance(value, str) or value not in _BY_SSH:
        notes.wrong(0, f"ansible_connection: {grammar.show(value)} is not SSH; leave that host out")
    return None


_CONVERT: dict[str, Callable[[Any, Notes], Any]] = {
    "port": _number,
    "ranks": _number,
    "python": _python,
    "proxy_jump": _proxy_jump,
    "transport": _transport,
}
