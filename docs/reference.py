"""The pages that are written by a program: every command, every key of an inventory, every setting.

    .venv/bin/python docs/reference.py            # writes docs/reference/*.md and deploy/inventory.schema.json

What they say comes from where it is checked: the commands' own help, the table of checks, the inventory's models, the
trainer's settings.
tests/cli/test_reference.py fails where a page is older than these.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from orchestrator.cli import SECTIONS, main
from orchestrator.doctor.table import CHECKS
from orchestrator.hosts import inventory as inventories
from trainer.shared.config import EXPERIMENTS, TRAINING, fields_of
from trainer.shared.setting_fields import declared

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = "<!-- written by docs/reference.py: change the code, then `make docs` -->"
WIDTH = 100
TRIED_FIRST = ("anyOf", "oneOf")


def pages() -> dict[str, str]:
    """Each file's text, by its path from the root of the repository."""
    return {
        "docs/reference/commands.md": commands(),
        "docs/reference/checks.md": checks(),
        "docs/reference/inventory.md": inventory(),
        "docs/reference/settings.md": settings(),
        "deploy/inventory.schema.json": json.dumps(inventory_schema(), indent=2) + "\n",
    }


# ---- commands ----------------------------------------------------------------------------------------------------


def commands() -> str:
    parts = ["# Commands", WRITTEN, "Every command as `--help` shows it."]
    for title, members in SECTIONS.items():
        parts.append(f"## {title}")
        for command in members:
            parts += [f"### {name}\n\n```text\n{text}\n```" for name, text in helps(command, "orch")]
    return _page(parts)


def checks() -> str:
    rows = [f"| {check.id} | {check.name} | {check.level} | {check.causes} |" for check in CHECKS]
    about = "What [`orch doctor`](../doctor.md) looks for, how bad it is, and what it leads to if ignored."
    table = "\n".join(["| id | check | level | if ignored |", "| --- | --- | --- | --- |", *rows])
    more = "A part of what a check looks for may only warn, or block, beside its level: each finding says its own."
    return _page(["# Checks", WRITTEN, about, table, more])


def helps(command: click.Command, above: str) -> Iterator[tuple[str, str]]:
    """Of a command, and of those below it: its whole name, and its help."""
    context = click.Context(main, info_name=above, **main.context_settings)
    name = f"{above} {command.name}"
    context = click.Context(command, info_name=command.name, parent=context, terminal_width=WIDTH)
    yield name, command.get_help(context)
    for below in getattr(command, "commands", {}).values():
        yield from helps(below, name)


# ---- the inventory -----------------------------------------------------------------------------------------------


def inventory() -> str:
    definitions = inventory_schema()["$defs"]
    host, shared = definitions["Entry"]["properties"], definitions["Defaults"]["properties"]
    parts = ["# The inventory", WRITTEN, "One YAML file describes a cluster: `cluster`, `defaults` and `nodes`."]
    parts += ["## Keys of a node alone", _keys({key: one for key, one in host.items() if key not in shared})]
    parts += ["## Keys of a node or of `defaults`", "What a node says itself wins over `defaults`.", _keys(shared)]
    parts += ["## `engine.slurm`: a cluster whose hosts Slurm lends", _keys(definitions["SlurmEntry"]["properties"])]
    parts += ["## `slurm`, of a node, with `engine: slurm`", _keys(definitions["SlurmTypeEntry"]["properties"])]
    parts += ["## `paced`: the speed of a GPU that is not there", _keys(definitions["PacedEntry"]["properties"])]
    parts += ["## `slowdown`, within `paced`", _keys(definitions["SlowdownEntry"]["properties"])]
    return _page(parts)


def inventory_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of an inventory file, for editors, with what the code says below each key."""
    schema = inventories.InventoryFile.model_json_schema()
    for name, docs in _docs_of_keys().items():
        for key, described in schema["$defs"].get(name, {}).get("properties", {}).items():
            described |= {"description": docs[key]} if key in docs else {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "orch inventory"}


def _docs_of_keys() -> dict[str, dict[str, str]]:
    """By class and key. pydantic reads them, too, but at each import."""
    found: dict[str, dict[str, str]] = {}
    for kind in ast.parse(inspect.getsource(inventories)).body:
        if isinstance(kind, ast.ClassDef):
            inherited = [found.get(base.id, {}) for base in kind.bases if isinstance(base, ast.Name)]
            found[kind.name] = {key: text for docs in inherited for key, text in docs.items()}
            for field, doc in pairwise(kind.body):
                if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                    found[kind.name][field.target.id] = inspect.cleandoc(doc.value.value)
    return found


def _keys(properties: Mapping[str, Any]) -> str:
    rows = [(f"`{key}`", _kind(one), _default(one), one.get("description", "")) for key, one in properties.items()]
    return _table(("key", "value", "default", "meaning"), rows)


def _kind(schema: Mapping[str, Any]) -> str:
    """A JSON Schema's type in words: `units`, `1 to 65535`, `cpu or cuda`."""
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    for name in TRIED_FIRST:
        kinds = [_kind(one) for one in schema.get(name, ()) if one.get("type") != "null"]
        if kinds:
            return " or ".join(dict.fromkeys(kinds))
    kind = {"string": "text", "integer": "whole number", "object": "map", "array": "list", "boolean": "true or false"}
    bounds = [f"{word} {schema[key]}" for key, word in BOUNDS.items() if key in schema]
    return " ".join([kind.get(schema.get("type", ""), schema.get("type", "map")), *bounds])


BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}


def _default(schema: Mapping[str, Any]) -> str:
    value = schema.get("default")
    return "" if value is None or value in ({}, []) else f"`{json.dumps(value).strip(chr(34))}`"


# ---- settings ----------------------------------------------------------------------------------------------------


def settings() -> str:
    names = list(TRAINING)
    training = "Given by `orch run --set KEY=VALUE`; an experiment has a value of its own for each."
    parts = ["# Settings", WRITTEN, "## Training", training, _settings(names)]
    nothing = "Measures the network and trains nothing."
    parts += ["## `--exp collectives`", nothing, _settings(["collectives"])]
    return _page(parts)


def _settings(experiments: Sequence[str]) -> str:
    rows = []
    for name, field in fields_of(experiments[0]).items():
        if name == "exp":
            continue
        choices = ", ".join(f"`{choice}`" for choice in declared(field).choices)
        values = [_value(EXPERIMENTS[experiment][name]) for experiment in experiments]
        rows.append((f"`{name}`", choices or str(field.type), *values, declared(field).help))
    return _table(("setting", "values", *experiments, "meaning"), rows)


def _value(value: object) -> str:
    return "" if value == "" else f"`{str(value).lower() if isinstance(value, bool) else value}`"


# ---- Markdown ----------------------------------------------------------------------------------------------------


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        titles,
        ["---"] * len(titles),
        *([" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _page(parts: Sequence[str]) -> str:
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")
