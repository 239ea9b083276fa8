"""Reads an inventory: a YAML file that describes a cluster's hosts becomes a checked `Inventory`, or all its mistakes.

inventory = load_inventory(Path("inventory/a2000_v100.yaml"))
inventory.node("v100").bandwidth_bps         # 2500000000.0
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from orchestrator.errors import InventoryError, Mistake, UsageError
from orchestrator.hosts import grammar
from orchestrator.hosts.cluster import MASK, Cluster
from orchestrator.hosts.grammar import MOST_HOSTS
from orchestrator.hosts.inventory import Defaults, Entry, Inventory, InventoryFile, Node, Written, mistake_of, once
from orchestrator.hosts.node_names import without_brackets
from orchestrator.hosts.occupied import not_allowed
from orchestrator.hosts.yamlfile import REFUSED, Document, KeyPath, read_yaml, resolve_scalar
from orchestrator.paths import Home
from orchestrator.text import one_line
from orchestrator.units import parse_bandwidth, parse_bytes, parse_duration


def load_inventory(path: Path) -> Inventory:
    """Reads and checks an inventory. Raises InventoryError with all mistakes of the file, in order of their lines."""
    written = read_yaml(path, verbatim=["env"])
    document = with_ranges(written)
    try:
        return parse_inventory(document)
    except InventoryError as error:
        raise error if document is written else InventoryError(once(error.mistakes)) from error


def parse_inventory(document: Document) -> Inventory:
    """The inventory that a document describes. Raises InventoryError with all its mistakes."""
    mistakes = [*document.mistakes, *_mistakes_of_form(document)]
    nodes = _build_nodes(document, mistakes)
    mistakes += check_together(nodes, document.file)
    if mistakes:
        raise InventoryError(sorted(mistakes, key=lambda mistake: mistake.line))
    warning = f"{document.file}: every user of this machine can change this file; try chmod o-w"
    return Inventory(
        cluster=document.values["cluster"],
        nodes=tuple(nodes),
        file=document.file,
        defaults=dict(document.values.get("defaults", {})),
        warnings=(warning,) if document.world_writable else (),
    )


def node_from_keys(keys: Mapping[str, Any], source: str, defaults: Mapping[str, Any] | None = None) -> Node:
    """One node from the keys of the file's `nodes`, for a node that comes from elsewhere (source, in messages).
    defaults: as a file writes them.
    """
    values = {"cluster": "any", "defaults": dict(defaults or {}), "nodes": [named(dict(keys), str(keys.get("name")))]}
    document = Document(source, values, {}, (), False)
    return parse_inventory(document).nodes[0]


def _mistakes_of_form(document: Document) -> list[Mistake]:
    try:
        InventoryFile.model_validate(document.values)
    except ValidationError as error:
        return [mistake_of(details, document) for details in error.errors() if details["input"] is not REFUSED]
    return []


_Written_ = TypeVar("_Written_", bound=Written)


def _salvage(model: type[_Written_], values: Any) -> _Written_ | None:
    """What the right keys say, so that one wrong key does not hide the mistakes between nodes."""
    for _ in range(2):
        try:
            return model.model_validate(values)
        except ValidationError as error:
            wrong = {details["loc"][0] for details in error.errors() if details["loc"]}
            values = {key: value for key, value in values.items() if key not in wrong} if wrong else values
    return None


def _build_nodes(document: Document, mistakes: list[Mistake]) -> list[Node]:
    defaults = _salvage(Defaults, document.values.get("defaults", {})) or Defaults()
    written = document.values.get("nodes")
    nodes = []
    for index, values in enumerate(written if isinstance(written, list) else ()):
        entry = _salvage(Entry, values)
        if entry is None:
            continue
        node = _build_node(entry, defaults, document.line(("nodes", index)))
        if node is not None:
            nodes.append(node)
        elif values.get("host") is None:
            message = f"node {entry.name}: `host` is missing; give the name or address that SSH goes to"
            mistakes.append(Mistake(document.file, document.line(("nodes", index)), message))
    return nodes


def _build_node(entry: Entry, defaults: Defaults, line: int) -> Node | None:
    """The node in its final form; None when it says nowhere to connect to."""
    shared = named(defaults.model_dump(exclude_unset=True), entry.name)
    values = shared | entry.model_dump(exclude_unset=True)
    if values.get("transport") == "local":
        # This machine's own Python that holds orch, and with the `trainer` extra torch: the one surely fit here.
        values = {"host": "localhost", "python": sys.executable} | values
    if not values.get("host"):
        return None
    values["env"] = named(defaults.env, entry.name) | entry.env
    if values.get("bandwidth"):
        values["bandwidth_bps"] = parse_bandwidth(values["bandwidth"])
    if values.get("connect_timeout"):
        values["connect_timeout_s"] = parse_duration(values["connect_timeout"])
    if values.get("address"):
        values["address"], values["address_prefix"] = grammar.address(values["address"])
    if values.get("paced") and values["paced"].get("memory"):
        values["paced"]["memory_bytes"] = parse_bytes(values["paced"]["memory"])
    return Node.model_validate(values | {"line": line})


def check_together(nodes: Iterable[Node], file: str) -> list[Mistake]:
    """What is wrong between nodes: names, ways in or addresses that two share, and two masters."""
    nodes = list(nodes)
    by_ssh = [node for node in nodes if node.transport == "ssh"]
    return [
        *_shared(nodes, lambda node: node.name.lower(), "have the same name (upper and lower case are the same)", file),
        *_shared(
            by_ssh,
            lambda node: (node.host.lower(), node.port or 22, node.proxy_jump),
            "have the same host and port",
            file,
        ),
        *_shared(by_ssh, lambda node: node.address, "have the same training address", file),
        *_shared(nodes, lambda node: node.master or None, "are both pinned as master; keep one", file),
    ]


def _shared(nodes: list[Node], key: Callable[[Node], Hashable], problem: str, file: str) -> list[Mistake]:
    """One mistake for every node whose key another had before; None is no key."""
    first: dict[Hashable, Node] = {}
    mistakes = []
    for node in nodes:
        if (value := key(node)) is None or (other := first.setdefault(value, node)) is node:
            continue
        message = f"nodes {other.name} (line {other.line}) and {node.name} {problem}"
        mistakes.append(Mistake(file, node.line, message))
    return mistakes


# Nodes of an inventory that one entry stands for, made into an entry each before anything is checked. Pure.
#
#     - name: gpu[01-04]
#       host: 10.0.0.[11-14]
#
# The keys of RANGED may hold ranges as `--nodes` has them, all equally long; all else is the same for each node. In
# every
# text `{name}` stands for the node's name. Each node keeps the lines of the entry that it comes from, so that a mistake
# names these.

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


# What a remembered cluster takes from its inventory file again: defaults for further nodes, and values that may be
# secret, of which orch keeps none.
#
#     node, words = node_with_defaults(cluster, {"name": "a16", "host": "192.168.1.52"})
#     nodes = with_secrets(home, cluster, cluster.active())


def node_with_defaults(cluster: Cluster, keys: Mapping[str, Any]) -> tuple[Node, str]:
    """A node that the file does not have, with the file's defaults as they are now, else as they were at the last `up`;
    and in words what it has from them. Raises InventoryError for wrong keys.
    """
    defaults, source = cluster.defaults, f"the last `orch up` ({cluster.file} cannot be used now)"
    with suppress(InventoryError):
        inventory = load_inventory(Path(cluster.file))
        if inventory.cluster == cluster.name:
            defaults, source = inventory.defaults, cluster.file
    inherited = [key for key in defaults if key not in keys]
    words = f"{', '.join(inherited)}: from the defaults of {source}" if inherited else ""
    return node_from_keys(keys, "node add", defaults), words


def keys_of_new_node(name: str, pairs: Mapping[str, str]) -> dict[str, Any]:
    """pairs: keys of an inventory's node as a person types them. Raises InventoryError for wrong ones, UsageError for
    `prepare`.
    """
    keys = {"name": name, **{key: resolve_scalar(value) for key, value in pairs.items()}}
    if node_from_keys({"host": "any", **keys}, "node add").prepare:
        raise UsageError("orch keeps no `prepare` of its own", "write the node into the inventory file")
    return keys


def extra_again(cluster: Cluster, inventory: Inventory) -> tuple[Node, ...]:
    """The cluster's nodes that the file does not have, with the file's defaults of now."""
    return tuple(
        node_from_keys(
            cluster.extra_keys[node.name], f"node {node.name}, added to {inventory.file}", inventory.defaults
        )
        if node.name in cluster.extra_keys
        else node
        for node in cluster.extra
    )


def with_secrets(home: Home, cluster: Cluster, nodes: Sequence[Node]) -> list[Node]:
    """These nodes with `prepare` and the values of `env` that may be secrets: we keep none, they are read from the
    inventory again.

    Raises UsageError if the inventory no longer holds them, or if it now runs on this machine what nobody allowed.
    """
    masked = any(MASK in (*node.env.values(), node.prepare) for node in nodes)
    if not masked and all(node.transport != "local" for node in nodes):
        return list(nodes)
    again = f"orch keeps no values of `env` and no `prepare`; `orch up {cluster.file}` again"
    try:
        inventory = load_inventory(Path(cluster.file))
    except InventoryError as error:
        if not masked:
            return list(nodes)
        raise UsageError(str(error.mistakes[0]), again) from error
    nodes_now = {node.name: node for node in (*extra_again(cluster, inventory), *inventory.nodes)}
    now = [nodes_now[node.name] for node in nodes if node.name in nodes_now]
    if commands := not_allowed(home, now):
        keys = "; ".join(f"{command.node}: {command.key}" for command in commands)  # a value may hold a secret
        raise UsageError(
            f"{cluster.file}: you have not allowed what it now runs on this machine: {keys}",
            f"read it, then `orch up {cluster.file}`, which asks you about it",
        )
    return [_with_secrets(cluster, node, nodes_now.get(node.name), again) for node in nodes] if masked else list(nodes)


def _with_secrets(cluster: Cluster, node: Node, now: Node | None, again: str) -> Node:
    """Raises UsageError."""
    known = now.env.keys() if now else set()
    for key, same in (("env", known == node.env.keys()), ("prepare", bool(now and now.prepare) == bool(node.prepare))):
        if not same:
            raise UsageError(
                f"{cluster.file}: the `{key}` of node {node.name} is not the one of the last `orch up`", again
            )
    return node.model_copy(update={"env": now.env, "prepare": now.prepare} if now else {})
