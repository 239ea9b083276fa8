"""Ansible's inventories in YAML: groups as mappings with `hosts`, `vars` and `children`. Pure.

all:
  children:
    v100:
      hosts: {"gpu[01:04].lab": }
      vars: {ansible_user: me}
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from orchestrator.errors import Mistake
from orchestrator.hosts import grammar
from orchestrator.hosts.forms.ansible import carried, left_out
from orchestrator.hosts.forms.ansible_groups import Tree, imported
from orchestrator.hosts.forms.imported import Given, Imported, Notes
from orchestrator.hosts.inventory import nearest
from orchestrator.hosts.yamlfile import REFUSED, Document, KeyPath

_KEYS = ["children", "hosts", "vars"]
_VAULT = "is kept by ansible-vault, which orch does not open; write the plain value, or take it out"
_DEFAULTS = re.compile("; [^;]*`defaults`$")
_TAGS = "tags are not supported"


def read_ansible_yaml(document: Document) -> Imported:
    """document: of `yamlfile`."""
    reader = _Reader(document)
    if "plugin" in document.values:
        words = (
            "configures an inventory plugin; `ansible-inventory -i FILE --list --yaml` prints the hosts that it finds"
        )
        reader.tree.notes.wrong(document.line(("plugin",)), words)
        reader.tree.hosts.clear()
    else:
        for name in document.values:
            reader.group(name, (name,))
    reader.tree.notes.mistakes += reader.of_yaml()
    return imported(reader.tree)


class _Reader:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.tree = Tree(Notes(document.file))
        self.not_needed: set[int] = set()
        """Lines of refused values that nobody carries over."""

    def of_yaml(self) -> list[Mistake]:
        """What the YAML itself gets wrong, where it matters to us."""
        found = [m for m in self.document.mistakes if not (m.line in self.not_needed and m.message.startswith(_TAGS))]
        return [replace(mistake, message=_words(mistake.message)) for mistake in found]

    def group(self, name: str, path: KeyPath) -> None:
        group = self.tree.group(name, self.document.line(path))
        for key, values in self._mapping(path, f"group {grammar.show(name)}").items():
            where = (*path, key)
            if key == "hosts":
                self._hosts(name, where)
            elif key == "vars":
                group.variables |= self._variables(where)
            elif key == "children":
                for child in self._names(where):
                    group.children.setdefault(child, self.document.line((*where, child)))
                    self.group(child, (*where, child))
            elif values is not REFUSED:
                words = f"unknown key {grammar.show(key)} in group {grammar.show(name)}; {nearest(key, _KEYS)}"
                self.tree.notes.wrong(self.document.line(where), words)

    def _hosts(self, group: str, path: KeyPath) -> None:
        for host in self._names(path):
            where = (*path, host)
            self.tree.add_hosts(group, host, self.document.line(where), self._variables(where))

    def _names(self, path: KeyPath) -> list[str]:
        """Of a mapping its keys; a single one may stand for itself."""
        value = self._at(path)
        return [value] if isinstance(value, str) else list(self._mapping(path, f"`{path[-1]}`"))

    def _variables(self, path: KeyPath) -> dict[str, Given]:
        variables = {}
        for name, value in self._mapping(path, "variables").items():
            line = self.document.line((*path, name))
            if value is not REFUSED:
                variables[name] = Given(value, line)
            elif not carried(name):
                self.not_needed.add(line)
                self.tree.notes.drop(line, left_out(name))
        return variables

    def _mapping(self, path: KeyPath, what: str) -> dict[str, Any]:
        value = self._at(path)
        if value is None or value is REFUSED or isinstance(value, dict):
            return value if isinstance(value, dict) else {}
        self.tree.notes.wrong(self.document.line(path), f"{what} must be a mapping (`name:` lines), not {_kind(value)}")
        return {}

    def _at(self, path: KeyPath) -> Any:
        value: Any = self.document.values
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def _words(message: str) -> str:
    """What a reader of YAML says, where it would send people to our own inventory's keys."""
    return _VAULT if "'!vault" in message else _DEFAULTS.sub("; write the value out", message)


def _kind(value: Any) -> str:
    """And not what it is: it may be a secret."""
    return "a list" if isinstance(value, list) else "a single value"


def is_vault(text: str) -> bool:
    """Whether the whole file is encrypted."""
    return bool(re.match(r"\s*\$ANSIBLE_VAULT;", text))
