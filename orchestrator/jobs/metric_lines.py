"""Lines that a host wrote as JSON events (metrics.jsonl, gpu.jsonl), read leniently: nothing in them is trusted. Pure.

    for line in whole_lines(file):
        if line and (event := parse_event(line)):
            step, t_ms = count(event, "step"), duration(event, "t_ms")      # None where the line holds no such number

Which events and fields there are stands in `trainer.shared.metrics`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import IO, Any

from orchestrator.text import one_line
from trainer.shared.metrics import LARGEST, LINE_LIMIT

LARGEST_NUMBER = 1e15
"""The largest number that is read, bytes of memory included: a float does not hold every whole number beyond it."""


def whole_lines(source: IO[bytes]) -> Iterator[bytes | None]:
    """Each line with its newline, None in place of one that is too long; only the last may lack a newline."""
    while line := source.readline(LINE_LIMIT):
        if len(line) < LINE_LIMIT or line.endswith(b"\n"):
            yield line
            continue
        while (rest := source.readline(LINE_LIMIT)) and not rest.endswith(b"\n"):
            pass
        yield None


def parse_event(line: str | bytes) -> dict[str, Any] | None:
    """None for what is no JSON object, or too long."""
    if len(line) > LINE_LIMIT:
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(event: Mapping[str, Any], key: str, largest: float = LARGEST_NUMBER) -> float | None:
    """A finite number; None where the field is absent, something else or beyond `largest`."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > largest:
        return None
    return float(value) if math.isfinite(value) else None


def count(event: Mapping[str, Any], key: str, largest: float = LARGEST_NUMBER) -> int | None:
    """A whole number of at least 0."""
    value = number(event, key, largest)
    return int(value) if value is not None and value >= 0 and value == int(value) else None


def duration(event: Mapping[str, Any], key: str, largest: float = LARGEST) -> float | None:
    """A time, in the field's own unit: at least 0, at most `largest`."""
    value = number(event, key, largest)
    return value if value is not None and value >= 0 else None


def text(event: Mapping[str, Any], key: str) -> str | None:
    """One printable line; None where there is nothing to read."""
    value = event.get(key)
    return one_line(value) if isinstance(value, str) and one_line(value).strip() else None
