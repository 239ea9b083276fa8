"""What Ansible's variables of a host mean to us, and the inventory that Ansible would read. Pure.

keys_of({"ansible_user": Given("me", 4)}, notes)["user"].value      # "me"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.hosts import grammar
from orchestrator.hosts.forms.imported import Exported, Given, Notes, without_place
from orchestrator.hosts.forms.yaml_text import flow, scalar
from orchestrator.hosts.inventory import Node

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
_INSTEAD = "write the plain value, or take what `ansible-inventory -i FILE --list --yaml` prints"
_PLACED = {"name", "host", "port", "user", "key_file", "python", "proxy_jump", "ranks", "gpus", "transport"}


def carried(variable: str) -> bool:
    return variable in _KEYS


def keys_of(variables: Mapping[str, Given], notes: Notes) -> dict[str, Given]:
    """Keys of a node. What is not carried over, and what is wrong, goes to the notes."""
    keys: dict[str, Given] = {}
    for name, given in variables.items():
        if name not in _KEYS:
            notes.drop(given.line, left_out(name))
    for name, key in _KEYS.items():
        if name not in variables or key in keys:
            continue
        given = variables[name]
        if needs_jinja(given.value):
            notes.wrong(given.line, f"{name} holds a Jinja expression, which only Ansible can compute; {_INSTEAD}")
            continue
        value = None if given.value is None else _CONVERT.get(key, _as_it_is)(given, notes)
        if value is not None:
            keys[key] = Given(value, given.line)
    return keys


def left_out(name: str) -> str:
    shown = name if re.fullmatch(r"\w{1,60}", name) else grammar.show(name)
    return f"{shown} is {'a secret, and ' if _SECRET.search(name) else ''}not carried over"


def needs_jinja(value: Any) -> bool:
    return isinstance(value, str) and ("{{" in value or "{%" in value)


def _as_it_is(given: Given, notes: Notes) -> Any:
    return given.value


def _number(given: Given, notes: Notes) -> Any:
    text = given.value
    return int(text) if isinstance(text, str) and re.fullmatch("[0-9]{1,6}", text) else text


def _python(given: Given, notes: Notes) -> Any:
    if not isinstance(given.value, str):
        return given.value
    if given.value.startswith("auto"):
        notes.drop(
            given.line, f"ansible_python_interpreter={given.value[:20]!r} is not carried over: orch takes `python3`"
        )
        return None
    return re.sub(r"^/usr/bin/env\s+(?=[\w.-]+$)", "", given.value)


def _proxy_jump(given: Given, notes: Notes) -> Any:
    match = _JUMP.fullmatch(given.value) if isinstance(given.value, str) else None
    if not match:
        notes.drop(given.line, "ansible_ssh_common_args is not carried over: of its options only `-J HOST` has a place")
    return match and match[1]


def _transport(given: Given, notes: Notes) -> Any:
    if given.value == "local":
        return "local"
    if given.value not in _BY_SSH:
        notes.wrong(given.line, f"ansible_connection: {grammar.show(given.value)} is not SSH; leave that host out")
    return None


_CONVERT: dict[str, Callable[[Given, Notes], Any]] = {
    "port": _number,
    "ranks": _number,
    "python": _python,
    "proxy_jump": _proxy_jump,
    "transport": _transport,
}


def write_ansible(cluster: str, nodes: Sequence[Node]) -> Exported:
    """An inventory in YAML. Ansible does not know `orch_ranks`; it is for the way back."""
    lines = [f"# The hosts of cluster {cluster}, written by orch.", "all:", "  hosts:"]
    lines += [f"    {scalar(node.name)}: {flow(_variables(node))}" for node in nodes]
    return Exported("\n".join(lines) + "\n", tuple(without_place(nodes, _PLACED, "an Ansible inventory")))


def _variables(node: Node) -> dict[str, Any]:
    values = {
        "ansible_host": node.host,
        "ansible_port": node.port,
        "ansible_user": node.user,
        "ansible_ssh_private_key_file": node.key_file,
        "ansible_python_interpreter": _interpreter(node.python),
        "ansible_ssh_common_args": node.proxy_jump and f"-J {node.proxy_jump}",
        "ansible_connection": "local" if node.transport == "local" else None,
        "orch_ranks": node.ranks or node.gpus,
    }
    return {key: value for key, value in values.items() if value}


def _interpreter(python: str) -> str | None:
    if python == "python3":
        return None  # as Ansible finds one by itself
    return python if "/" in python else f"/usr/bin/env {python}"
