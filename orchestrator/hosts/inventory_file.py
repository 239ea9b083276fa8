"""Reads an inventory, a YAML file that describes a cluster's hosts, into a checked `Inventory`.

Also expands ranges in entries, and reads defaults and secrets for a remembered cluster, which does not store them.
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
from orchestrator.hosts.grammar import MOST_HOSTS, without_brackets
from orchestrator.hosts.inventory import (
    Defaults,
    EngineEntry,
    Entry,
    Inventory,
    InventoryFile,
    Node,
    SlurmEngine,
    Written,
    mistake_of,
    once,
)
from orchestrator.hosts.occupied import not_allowed
from orchestrator.hosts.yamlfile import REFUSED, Document, KeyPath, read_yaml, resolve_scalar
from orchestrator.paths import Home
from orchestrator.units import one_line, parse_bandwidth, parse_bytes, parse_duration


def load_inventory(path: Path) -> Inventory:
    """Raises InventoryError with all mistakes, by line."""
    written = read_yaml(path, verbatim=["env"])
    document = with_ranges(written)
    try:
        return parse_inventory(document)
    except InventoryError as error:
        raise error if document is written else InventoryError(once(error.mistakes)) from error


def parse_inventory(document: Document) -> Inventory:
    mistakes = [*document.mistakes, *_mistakes_of_form(document)]
    engine = _engine(document, mistakes)
    nodes = _build_nodes(document, mistakes, engine)
    mistakes += check_together(nodes, document.file)
    if mistakes:
        raise InventoryError(sorted(mistakes, key=lambda mistake: mistake.line))
    warning = f"{document.file}: every user of this machine can change this file; try chmod o-w"
    return Inventory(
        cluster=document.values["cluster"],
        nodes=tuple(nodes),
        file=document.file,
        defaults=dict(document.values.get("defaults", {})),
        entries=tuple(document.values["nodes"]) if engine else (),
        engine=engine,
        warnings=(warning,) if document.world_writable else (),
    )


def node_from_keys(keys: Mapping[str, Any], source: str, defaults: Mapping[str, Any] | None = None) -> Node:
    """keys, defaults: as in a file. source: for messages."""
    values = {"cluster": "any", "defaults": dict(defaults or {}), "nodes": [named(dict(keys), str(keys.get("name")))]}
    document = Document(source, values, {}, (), False)
    return parse_inventory(document).nodes[0]


def _mistakes_of_form(document: Document) -> list[Mistake]:
    try:
        InventoryFile.model_validate(document.values)
    except ValidationError as error:
        return [mistake_of(details, document) for details in error.errors() if details["input"] is not REFUSED]
    return []


def _engine(document: Document, mistakes: list[Mistake]) -> SlurmEngine | None:
    """Also adds keys that contradict the file's engine, or its absence."""
    written = document.values.get("engine")
    engine = _salvage(EngineEntry, written)
    wrong = {
        "host": "Slurm chooses the hosts, by `slurm:`",
        "workdir": "it is in `engine: {slurm: {workdir: ...}}`",
        "transport": "`engine: slurm` reaches its hosts through the login host",
        "address": "hosts are known only in a job",
    }
    if not written:
        wrong = dict.fromkeys(("slurm", "most"), "it needs `engine: {slurm: {login: ..., workdir: ...}}` in the file")
    nodes = document.values.get("nodes")
    by_place: dict[KeyPath, Any] = {("defaults",): document.values.get("defaults")}
    by_place |= {("nodes", at): node for at, node in enumerate(nodes if isinstance(nodes, list) else ())}
    for place, values in by_place.items():
        for key in wrong.keys() & values.keys() if isinstance(values, dict) else ():
            where = f"node {grammar.show(values.get('name'))}" if len(place) > 1 else "defaults"
            mistakes.append(Mistake(document.file, document.line((*place, key)), f"{where}: `{key}`: {wrong[key]}"))
    return engine.slurm if engine else None


_Written_ = TypeVar("_Written_", bound=Written)


def _salvage(model: type[_Written_], values: Any) -> _Written_ | None:
    """Uses only valid keys, so that one mistake does not hide mistakes between nodes."""
    for _ in range(2):
        try:
            return model.model_validate(values)
        except ValidationError as error:
            wrong = {details["loc"][0] for details in error.errors() if details["loc"]}
            values = {key: value for key, value in values.items() if key not in wrong} if wrong else values
    return None


def _build_nodes(document: Document, mistakes: list[Mistake], engine: SlurmEngine | None = None) -> list[Node]:
    defaults = _salvage(Defaults, document.values.get("defaults", {})) or Defaults()
    written = document.values.get("nodes")
    nodes = []
    for index, values in enumerate(written if isinstance(written, list) else ()):
        entry = _salvage(Entry, values)
        if entry is None:
            continue
        node = _build_node(entry, defaults, document.line(("nodes", index)), engine)
        if node is not None:
            nodes.append(node)
        elif values.get("host") is None and "engine" not in document.values:
            message = f"node {entry.name}: `host` is missing; give the name or address that SSH goes to"
            mistakes.append(Mistake(document.file, document.line(("nodes", index)), message))
    return nodes


def _build_node(entry: Entry, defaults: Defaults, line: int, engine: SlurmEngine | None = None) -> Node | None:
    shared = named(defaults.model_dump(exclude_unset=True), entry.name)
    values = shared | entry.model_dump(exclude_unset=True)
    if values.get("transport") == "local":
        # The Python that runs orch is the only one known to work here; the `trainer` extra gives it torch.
        values = {"host": "localhost", "python": sys.executable} | values
    if engine:
        values |= {"transport": "slurm", "workdir": engine.workdir, **grammar.login_parts(engine.login)}
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
    """Mistakes between nodes: shared names, endpoints or addresses, a second master."""
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
    """One mistake per repeated key; None is ignored."""
    first: dict[Hashable, Node] = {}
    mistakes = []
    for node in nodes:
        if (value := key(node)) is None or (other := first.setdefault(value, node)) is node:
            continue
        message = f"nodes {other.name} (line {other.line}) and {node.name} {problem}"
        mistakes.append(Mistake(file, node.line, message))
    return mistakes


# Ranges. One entry may stand for many nodes, and is expanded before any check:
#
#     - name: gpu[01-04]
#       host: 10.0.0.[11-14]
#
# The keys of RANGED may hold ranges of equal length; `{name}` in any text is the node's name. Each node keeps the lines
# of its entry for messages. Pure.

RANGED = (
    *("name", "host", "address", "user", "key_file", "proxy_jump"),
    *("workdir", "python", "interface", "id", "image", "note", "gpu"),
)
_RANGE = re.compile(r"\[[0-9, -]*\]|\[[^\]:]*$|^[^\[]*\]")
"""A range or half of one; no IPv6 address in brackets."""
_PROSE = ("id", "image", "note", "gpu")
_WHOLE_RANGE = re.compile(r"\[\d[0-9, -]*\]")
_NAME = re.compile(r"(?<!\$)(\{\{name\}\}|\{name\})")
"""`${name}` is the shell's; `{{name}}` becomes `{name}`."""


def with_ranges(document: Document) -> Document:
    """Expands ranges. Raises InventoryError above MOST_HOSTS nodes, before expanding further."""
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
    if not isinstance(entry, dict):
        return []
    texts = {key: entry[key] for key in RANGED if isinstance(entry.get(key), str)}
    return [key for key, text in texts.items() if (_WHOLE_RANGE if key in _PROSE else _RANGE).search(text)]


def named(value: Any, name: str) -> Any:
    """Replaces `{name}` by the node's name in all texts."""
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
    """Makes an entry per node; if the ranges are wrong, one entry without them."""
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


# Values that a remembered cluster reads from its inventory again: defaults for added nodes, and possible secrets, which
# orch does not store.


def node_with_defaults(cluster: Cluster, keys: Mapping[str, Any]) -> tuple[Node, str]:
    """A node with the defaults of the file, or of the last `up`, and its inherited keys. Raises InventoryError."""
    defaults, source = cluster.defaults, f"the last `orch up` ({cluster.file} cannot be used now)"
    with suppress(InventoryError):
        inventory = load_inventory(Path(cluster.file))
        if inventory.cluster == cluster.name:
            defaults, source = inventory.defaults, cluster.file
    inherited = [key for key in defaults if key not in keys]
    words = f"{', '.join(inherited)}: from the defaults of {source}" if inherited else ""
    return node_from_keys(keys, "node add", defaults), words


def removed_node(cluster: Cluster, name: str) -> Node | None:
    """The file's node of this name, if `orch node remove` took it out."""
    with suppress(InventoryError):
        inventory = load_inventory(Path(cluster.file))
        if name in cluster.removed and inventory.cluster == cluster.name:
            return next((node for node in inventory.nodes if node.name == name), None)
    return None


def keys_of_new_node(name: str, pairs: Mapping[str, str]) -> dict[str, Any]:
    """pairs: as typed. Raises InventoryError, or UsageError for `prepare`."""
    keys = {"name": name, **{key: resolve_scalar(value) for key, value in pairs.items()}}
    if node_from_keys({"host": "any", **keys}, "node add").prepare:
        raise UsageError("orch does not store a `prepare` of its own", "write the node into the inventory file")
    return keys


def extra_again(cluster: Cluster, inventory: Inventory) -> tuple[Node, ...]:
    return tuple(
        node_from_keys(
            cluster.extra_keys[node.name], f"node {node.name}, added to {inventory.file}", inventory.defaults
        )
        if node.name in cluster.extra_keys
        else node
        for node in cluster.extra
    )


def with_secrets(home: Home, cluster: Cluster, nodes: Sequence[Node]) -> list[Node]:
    """Fills in `prepare` and secret values of `env` from the inventory.

    Raises UsageError if they changed, or if the file now runs commands on this machine that the user has not allowed.
    """
    masked = any(MASK in (*node.env.values(), node.prepare) for node in nodes)
    if not masked and all(node.transport != "local" for node in nodes):
        return list(nodes)
    again = f"orch does not store values of `env` or `prepare`; `orch up {cluster.file}` again"
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
    known = now.env.keys() if now else set()
    for key, same in (("env", known == node.env.keys()), ("prepare", bool(now and now.prepare) == bool(node.prepare))):
        if not same:
            raise UsageError(
                f"{cluster.file}: the `{key}` of node {node.name} is not the one of the last `orch up`", again
            )
    return node.model_copy(update={"env": now.env, "prepare": now.prepare} if now else {})
