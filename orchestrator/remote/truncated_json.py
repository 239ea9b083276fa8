"""Shortens a supervisor's record until its JSON fits into a message.

    fitted(record, 24_000)      # the record itself, or one with shorter texts and lists

A non-ASCII character takes up to 12 bytes. The first `failures` and `leftovers` stay, and the last `faults`, which are
the newest; `first_failure` is cut last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_STEPS = ((200, 8), (100, 4), (50, 2), (20, 1))
"""(characters of a text, entries of a list): the first pair that fits is used."""
_SENTENCES = ("reason", "log_line")
_FEW = 20  # most ranks and hosts after the last step


def fitted(record: Mapping[str, Any], most_bytes: int) -> dict[str, Any]:
    short = dict(record)
    for chars, count in _STEPS:
        if _json_bytes(short) <= most_bytes:
            return short
        short = _shorter(short, chars, count)
    if _json_bytes(short) > most_bytes:
        short |= {name: _few(name, short[name]) for name in ("ranks", "dropped") if name in short}
    if short.get("first_failure") and _json_bytes(short) > most_bytes:
        short["first_failure"] = _cut(short["first_failure"], _STEPS[0][0])
    return short


def _json_bytes(value: Any) -> int:
    return len(json.dumps(value))


def _shorter(record: dict[str, Any], chars: int, count: int) -> dict[str, Any]:
    short = dict(record)
    for name in ("failures", "leftovers", "faults"):
        if name in short:
            kept = short[name][-count:] if name == "faults" else short[name][:count]
            short[name] = [_cut(one, chars) for one in kept]
    return short


def _cut(one: Any, chars: int) -> Any:
    if isinstance(one, str):
        return one[:chars]
    return {name: _cut(value, chars) if name in _SENTENCES else value for name, value in one.items()}


def _few(name: str, entries: dict[str, Any]) -> dict[str, Any]:
    worth = {key: one for key, one in entries.items() if name != "ranks" or one.get("exit_code") != 0}
    return dict(list(worth.items())[:_FEW])
