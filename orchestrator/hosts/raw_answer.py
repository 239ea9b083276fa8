"""What a host answered, read piece by piece: each piece is checked, capped and printable, or a ValueError. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from orchestrator.hosts.facts import MAX_TEXT
from orchestrator.text import one_line

Command = Mapping[str, Any]


def clean(text: Any, limit: int = MAX_TEXT) -> str:
    """A host's words, fit for a terminal and a log: printable, on one line, cut."""
    if not isinstance(text, str):
        raise ValueError(f"a {type(text).__name__} in place of text")
    return one_line(text, limit)


def failure(command: Command | None) -> str | None:
    """Why a command gave nothing: the last line it said. None when it did well."""
    if command is None:
        return "not asked"
    if not isinstance(command["rc"], int):
        raise ValueError("no exit code")
    if command["rc"] == 0:
        return None
    said = f"{command['out']}\n{command['err']}".strip().splitlines()
    return (clean(said[-1]) if said else "") or f"exit code {command['rc']}"


def mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def at_most(value: Any, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError(f"not a list of at most {limit}")
    return value


def loads(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def whole(text: str) -> int:
    if not re.fullmatch(r"\s*\d{1,12}\s*", text, re.ASCII):
        raise ValueError(f"{clean(text)!r} is no number")
    return int(text)


def text_or_none(value: Any) -> str | None:
    """Some versions are numbers (cuDNN's): text all the same."""
    return None if value is None else clean(str(value)) if isinstance(value, (str, int)) else clean(value)
