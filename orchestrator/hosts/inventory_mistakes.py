"""Mistakes in an inventory, in words: where, what is wrong, what was expected. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from orchestrator.errors import Mistake
from orchestrator.hosts import grammar
from orchestrator.hosts.inventory import Defaults, Entry, InventoryFile, PacedEntry, SlowdownEntry, Written, nearest
from orchestrator.hosts.yamlfile import Document, KeyPath

_MODELS: dict[str, type[Written]] = {
    "": InventoryFile,
    "defaults": Defaults,
    "nodes": Entry,
    "paced": PacedEntry,
    "slowdown": SlowdownEntry,
}


def mistake_of(details: ErrorDetails, document: Document) -> Mistake:
    """One of pydantic's findings as a person should read it."""
    path = details["loc"]
    if path[-1:] == ("[key]",) and path[-3:-2] == ("env",):  # pydantic's word for: the key itself, not its value
        line = document.line(path[:-1])
        name = str(path[-2]).partition("=")[0]  # what stands behind may be a secret
        message = f"{grammar.show(name)} must be a variable's name alone: {grammar.ENV_FORM}"
        return Mistake(document.file, line, f"{_where(path[:-2], document)}{message}")
    kind = details["type"]
    if kind == "missing":
        message = f"`{path[-1]}` is missing"
    elif kind == "extra_forbidden":
        message = _unknown_key(path)
    else:
        return Mistake(document.file, document.line(path), f"{_where(path, document)}{problem(details)}")
    return Mistake(document.file, document.line(path), f"{_where(path[:-1], document)}{message}")


def once(mistakes: Sequence[Mistake]) -> list[Mistake]:
    """A line that many nodes have a value from is wrong once."""
    kept: dict[tuple[str, int, str], Mistake] = {}
    for mistake in mistakes:
        words = mistake.message.partition(": ")[2] if mistake.message.startswith("node ") else mistake.message
        kept.setdefault((mistake.file, mistake.line, words), mistake)
    return list(kept.values())


def _where(path: KeyPath, document: Document) -> str:
    """`node v100: paced.jitter: `: the words before a message."""
    words = []
    if "env" in path:  # somebody wrote `NAME=value` for a key: the value may be a secret
        path = tuple(part.partition("=")[0] if isinstance(part, str) else part for part in path)
    if path[:1] == ("nodes",) and len(path) > 1:
        node = document.values["nodes"][path[1]]
        name = node.get("name") if isinstance(node, dict) else None
        words.append(f"node {name if isinstance(name, str) and name.isprintable() else int(path[1]) + 1}")
        path = path[2:]
    elif path[:1] == ("defaults",):
        words.append("defaults")
        path = path[1:]
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if dotted:
        words.append(dotted if dotted.isprintable() and len(dotted) < 100 else grammar.show(dotted))
    return "".join(f"{word}: " for word in words)


def _unknown_key(path: KeyPath) -> str:
    key = str(path[-1])
    names = [part for part in path[:-1] if isinstance(part, str)]
    model = _MODELS[names[-1] if names else ""]
    if model is Defaults and key in Entry.model_fields:
        return f"`{key}` belongs to one node, not to `defaults`"
    return f"unknown key {grammar.show(key)}; {nearest(key, list(model.model_fields))}"


def problem(details: ErrorDetails) -> str:
    kind, found, limits = details["type"], details["input"], details.get("ctx", {})
    if kind == "value_error":
        return str(limits["error"])
    if found is None:
        return "is empty; give a value or remove the key"
    if kind == "string_type" and details["loc"][-1] in ("bandwidth", "memory"):
        example = "2.5Gbps" if details["loc"][-1] == "bandwidth" else "16GiB"
        return f"must be written with its unit, like {example}, not {_found(found)}"
    if kind in _FORMS:
        shown = _kind(found) if "env" in details["loc"] else _found(found)
        return f"{_FORMS[kind].format(**limits)}, not {shown}{_quote_hint(kind, found)}"
    return str(details["msg"])


_FORMS = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "dict_type": "must be a mapping like {{key: value}}",
    "model_type": "must be a mapping like {{key: value}}",
    "list_type": "must be a list, one item a line behind `- `",
    "too_short": "must hold at least one item",
}


def _kind(value: Any) -> str:
    """What a value of `env` is, for a message: the value itself may be a secret."""
    return {str: "text", bool: "true or false", dict: "a mapping", list: "a list"}.get(type(value), "a number")


def _found(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return grammar.show(value)


def _quote_hint(kind: str, found: Any) -> str:
    if kind == "string_type" and isinstance(found, (bool, int, float)):
        return "; put it in quotes"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(found, str):
        return "; write it plainly, without quotes, unit or leading zero"
    return ""
