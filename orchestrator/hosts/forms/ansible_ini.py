"""Ansible's inventories in INI: groups as sections, hosts as lines with variables behind them. Pure.

[v100]
gpu[01:04].lab ansible_user=me
[v100:vars]
ansible_port=2222
[rack:children]
v100
"""

from __future__ import annotations

import re
import shlex

from orchestrator.hosts import grammar
from orchestrator.hosts.forms.ansible_groups import Tree, imported
from orchestrator.hosts.forms.imported import Given, Imported, Notes

_SECTION = re.compile(r"\[([^:\]\s]+)(?::(\w+))?\]\s*(?:#.*)?")
_KINDS = ("hosts", "vars", "children")


def read_ini(file: str, text: str) -> Imported:
    tree = Tree(Notes(file))
    group, kind = "ungrouped", "hosts"
    needed: dict[str, tuple[int, str]] = {}
    """Groups that some line needs to be there: its line, and what it is."""
    declared = {"all", "ungrouped"}
    for number, whole in enumerate(text.split("\n"), 1):
        line = whole.strip()
        if not line or line[0] in "#;":
            continue
        section = _SECTION.fullmatch(line)
        if section:
            group, kind = section[1], section[2] or "hosts"
            _open(tree, group, kind, number)
            if kind == "vars":
                needed.setdefault(group, (number, f"[{group}:vars]"))
            else:
                declared.add(group)
        elif line[0] == "[" and line[-1] == "]":
            tree.notes.wrong(
                number, f"{grammar.show(line)} is no section; write [group], [group:vars] or [group:children]"
            )
        elif kind == "children":
            name = re.split("[#=]", line)[0].strip()  # what stands behind a `=` may be a secret
            tree.group(group, number).children.setdefault(name, number)
            needed.setdefault(name, (number, f"[{group}:children]"))
        else:
            (_variable if kind == "vars" else _host)(tree, group, line, number)
    for name, (number, what) in needed.items():
        if name not in declared:
            tree.notes.wrong(
                number, f"{what} names group {grammar.show(name)}, which is nowhere; write a section for it"
            )
    return imported(tree)


def _open(tree: Tree, group: str, kind: str, line: int) -> None:
    tree.group(group, line)
    if kind not in _KINDS:
        tree.notes.wrong(line, f"[{group}:{kind}]: {grammar.show(kind)} is none of {', '.join(_KINDS)}")


def _variable(tree: Tree, group: str, line: str, number: int) -> None:
    key, equals, value = line.partition("=")
    if not equals or not re.fullmatch(r"[^\s=]+", key.strip()):
        tree.notes.wrong(number, f"in [{group}:vars] each line is `variable=value`")  # what it holds may be a secret
        return
    tree.groups[group].variables[key.strip()] = Given(_unquoted(re.sub(r"\s+#.*", "", value).strip()), number)


def _host(tree: Tree, group: str, line: str, number: int) -> None:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        tree.notes.wrong(number, f"cannot be split into words ({error}); look for a quote without its other one")
        return
    if not words:
        return
    if "=" in words[0]:  # which may be a secret
        tree.notes.wrong(number, f"a variable stands where a host is expected; group variables go below [{group}:vars]")
        return
    variables = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:  # what it is may be a part of a secret
            tree.notes.wrong(number, "behind a host each word is `variable=value`; quote a value with blanks")
        else:
            variables[key] = Given(_unquoted(value), number)
    tree.add_hosts(group, words[0], number, variables)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
