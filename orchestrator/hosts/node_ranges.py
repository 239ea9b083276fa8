"""Nodes of an inventory that one entry stands for, made into an entry each before anything is checked. Pure.

    - name: gpu[01-04]
      host: 10.0.0.[11-14]

The keys of RANGED may hold ranges as `--nodes` has them, all equally long; all else is the same for each node. In every
text `{name}` stands for the node's name. Each node keeps the lines of the entry that it comes from, so that a mistake
names these.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestrator.errors import InventoryError, Mistake, UsageError
from orchestrator.hosts.grammar import MOST_HOSTS
from orchestrator.hosts.node_names import without_brackets
from orchestrator.hosts.yamlfile import REFUSED, Document, KeyPath
from orchestrator.text import one_line

RANGED = (
    *("name", "host", "address", "user", "key_file", "proxy_jump"),
    *("workdir", "python", "interface", "id", "image", "note", "gpu"),
)
_RANGE = re.compile(r"\[[0-9, -]*\]|\[[^\]:]*$|^[^\[]*\]")
"""Or the half of one; an IPv6 address in brackets is none."""
_PROSE = ("id", "image", "note", "gpu")
_WHOLE_RANGE = re.compile(r"\[\d[0-9, -]*\]")
_NAME = re.compile(r"(?<!\$)(\{\{name\}\}|\{name\})")
"""`${name}` is the shell's, `{{name}}` stays `{name}`."""


def with_ranges(document: Document) -> Document:
    """The document itself where no node has a range. Raises InventoryError, before any more is written out, where all
    entries together stand for more than MOST_HOSTS nodes.
    """
    written = document.values.get("nodes")
    if not isinstance(written, list) or not any(_ranged(entry) or _has_name(entry) for entry in written):
        return document
    nodes: list[Any] = []
    lines: dict[KeyPath, int] = {path: line for path, line in document.lines.items() if path[:1] != ("nodes",)}
    lines[("nodes",)] = document.line(("nodes",))
    mistakes = list(document.mistakes)
    by_entry = _lines_by_entry(document)
    for position, entry in enumerate(written):
        made = _entries(entry, document, position, mistakes) if _ranged(entry) else [entry]
        if len(nodes) + len(made) > MOST_HOSTS:
            raise _too_many(document, position)
        for one in made:
            lines |= {("nodes", len(nodes), *below): line for below, line in by_entry.get(position, {}).items()}
            nodes.append(named(one, one["name"]) if _has_name(one) else one)
    return replace(document, values={**document.values, "nodes": nodes}, lines=lines, mistakes=tuple(mistakes))


def _too_many(document: Document, position: int) -> InventoryError:
    words = f"with this entry the file stands for more than {MOST_HOSTS} hosts"
    return InventoryError([Mistake(document.file, document.line(("nodes", position)), words)])


def _ranged(entry: Any) -> list[str]:
    """The keys of an entry that hold a range."""
    if not isinstance(entry, dict):
        return []
    texts = {key: entry[key] for key in RANGED if isinstance(entry.get(key), str)}
    return [key for key, text in texts.items() if (_WHOLE_RANGE if key in _PROSE else _RANGE).search(text)]


def named(value: Any, name: str) -> Any:
    """The same with the node's name in place of `{name}`, in every text that it holds."""
    if isinstance(value, str):
        return _NAME.sub(lambda found: name if found[1] == "{name}" else "{name}", value)
    return {key: named(each, name) for key, each in value.items()} if isinstance(value, dict) else value


def _has_name(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and named(entry, "") != entry


def _lines_by_entry(document: Document) -> dict[int, dict[KeyPath, int]]:
    found: dict[int, dict[KeyPath, int]] = {}
    for path, line in document.lines.items():
        if path[:1] == ("nodes",) and len(path) > 1 and isinstance(path[1], int):
            found.setdefault(path[1], {})[path[2:]] = line
    return found


def _entries(entry: Mapping[str, Any], document: Document, position: int, mistakes: list[Mistake]) -> list[Any]:
    """One for each node; a single one without the values that are wrong where the ranges cannot be."""
    values: dict[str, list[str]] = {}
    wrong: dict[str, str] = {}
    for key in _ranged(entry):
        try:
            values[key] = list(itertools.islice(without_brackets(entry[key]), MOST_HOSTS + 1))
        except UsageError as error:
            wrong[key] = f"{key}: {one_line(error)}"
    if any(len(found) > MOST_HOSTS for found in values.values()):
        raise _too_many(document, position)
    count = len(values["name"]) if "name" in values else 1
    for key, found in values.items():
        if "name" not in wrong and len(found) != count:
            wrong[key] = (
                f"{key}: {one_line(entry[key])} stands for {len(found)}, `name` for {count}; give both equally many"
            )
    if wrong:
        mistakes += [Mistake(document.file, document.line(("nodes", position, key)), wrong[key]) for key in wrong]
        return [{**entry, **dict.fromkeys(_ranged(entry), REFUSED)}]
    return [{**entry, **{key: found[number] for key, found in values.items()}} for number in range(count)]
