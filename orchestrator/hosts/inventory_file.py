"""Reads an inventory: a YAML file that describes a cluster's hosts becomes a checked `Inventory`, or all its mistakes.

inventory = load_inventory(Path("inventory/a2000_v100.yaml"))
inventory.node("v100").bandwidth_bps         # 2500000000.0
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from orchestrator.errors import InventoryError, Mistake
from orchestrator.hosts import grammar
from orchestrator.hosts.inventory import Defaults, Entry, Inventory, InventoryFile, Node, Written
from orchestrator.hosts.inventory_mistakes import mistake_of, once
from orchestrator.hosts.node_ranges import named, with_ranges
from orchestrator.hosts.yamlfile import REFUSED, Document, read_yaml
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


def inventory_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of an inventory file, for editors."""
    schema = InventoryFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "orch inventory"}


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
