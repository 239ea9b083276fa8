"""Groups, hosts and variables of an Ansible inventory, and which variables a host has of all its groups. Pure.

A variable of a host wins over its groups', that of a group over the group around it; of groups that stand equally deep
the one wins whose name comes later, unless `ansible_group_priority` says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.hosts import grammar
from orchestrator.hosts.forms.ansible import keys_of, needs_jinja
from orchestrator.hosts.forms.ansible_hosts import hosts_of
from orchestrator.hosts.forms.imported import MOST_HOSTS, Given, Imported, ImportedHost, Notes, node_name

ALL = "all"
_PRIORITY = "ansible_group_priority"


@dataclass
class Group:
    line: int
    """Where it is first named."""
    hosts: dict[str, None] = field(default_factory=dict)
    children: dict[str, int] = field(default_factory=dict)
    """By their names, with their lines."""
    variables: dict[str, Given] = field(default_factory=dict)


@dataclass
class Tree:
    """What an inventory's reader fills."""

    notes: Notes
    groups: dict[str, Group] = field(default_factory=lambda: {ALL: Group(0)})
    hosts: dict[str, dict[str, Given]] = field(default_factory=dict)
    """Each one's own variables."""
    lines: dict[str, int] = field(default_factory=dict)
    """Where each host is first named."""

    def group(self, name: str, line: int) -> Group:
        return self.groups.setdefault(name, Group(line))

    def add_hosts(self, group: str, pattern: str, line: int, variables: Mapping[str, Given]) -> None:
        """pattern: as Ansible writes one or more hosts."""
        try:
            names, port = _names(pattern)
        except ValueError as error:
            return self.notes.wrong(line, str(error))
        if len(self.hosts) + len(names) > 2 * MOST_HOSTS:
            return self.notes.wrong(line, f"names more than {MOST_HOSTS} hosts")
        own = {**({"ansible_port": Given(port, line)} if port else {}), **variables}
        for name in names:
            self.group(group, line).hosts[name] = None
            self.hosts.setdefault(name, {}).update(own)
            self.lines.setdefault(name, line)
        return None


def _names(pattern: str) -> tuple[list[str], int | None]:
    if needs_jinja(pattern):
        raise ValueError(f"{grammar.show(pattern)} holds a Jinja expression, which only Ansible can compute")
    return hosts_of(pattern)


def imported(tree: Tree) -> Imported:
    """All hosts, in the order in which they are named."""
    notes = tree.notes
    depths = _depths(tree)
    parents: dict[str, list[str]] = {}
    for name, group in tree.groups.items():
        for child in group.children:
            parents.setdefault(child, []).append(name)
    around = {name: _around(name, parents) for name in tree.groups}
    groups_of: dict[str, set[str]] = {name: {ALL} for name in tree.hosts}
    for name, group in tree.groups.items():
        for host in group.hosts:
            groups_of[host] |= around[name]
    order = sorted(tree.groups, key=lambda name: (depths[name], _priority(tree.groups[name]), name))
    hosts = []
    for host, own in tree.hosts.items():
        variables: dict[str, Given] = {}
        for name in (name for name in order if name in groups_of[host]):
            variables |= tree.groups[name].variables
        keys = {"host": Given(host, tree.lines[host]), **keys_of({**variables, **own}, notes)}
        hosts.append(ImportedHost(node_name(host), tree.lines[host], keys))
    if not hosts and not notes.mistakes:
        notes.wrong(0, "names no host; is it the right file?")
    if named := [name for name in tree.groups if name not in (ALL, "ungrouped")]:
        notes.drop(0, f"groups are not carried over ({_some(named)}); `--nodes` takes names, ranges and patterns")
    return Imported(notes.file, tuple(hosts), tuple(notes.mistakes), notes.left_out())


def _some(names: list[str]) -> str:
    shown = [name if name.isprintable() and len(name) < 40 else grammar.show(name) for name in names[:5]]
    return ", ".join(shown) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _priority(group: Group) -> int:
    value = str(group.variables[_PRIORITY].value) if _PRIORITY in group.variables else "1"
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 1


def _around(name: str, parents: Mapping[str, Sequence[str]]) -> set[str]:
    """The group, and all that hold it."""
    found, todo = {ALL, name}, [name]
    while todo:
        new = [parent for parent in parents.get(todo.pop(), ()) if parent not in found]
        found |= set(new)
        todo += new
    return found


def _depths(tree: Tree) -> dict[str, int]:
    """How deep each group lies: one below the deepest that holds it. A circle is a mistake."""
    depths = dict.fromkeys(tree.groups, 1) | {ALL: 0}
    for _ in tree.groups:
        deeper = {
            child: depths[name] + 1
            for name, group in tree.groups.items()
            for child in group.children
            if child in depths and depths[child] <= depths[name]
        }
        if not deeper:
            return depths
        for child, depth in deeper.items():
            depths[child] = max(depths[child], depth)
    circle = sorted(deeper)
    line = min(tree.groups[name].line for name in circle)
    tree.notes.wrong(line, f"groups hold each other in a circle: {_some(circle)}; take one of them out of the other")
    return depths
