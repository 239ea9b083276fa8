"""Parses untrusted metrics lines; formulas that separate a step's waiting from network time. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, TypeVar

from orchestrator.units import one_line
from trainer.shared.metrics import LARGEST, LINE_LIMIT

LARGEST_NUMBER = 1e15
"""Larger whole numbers have no exact float."""


def whole_lines(source: IO[bytes]) -> Iterator[bytes | None]:
    """None for a line that is too long. Only the last may lack its newline."""
    while line := source.readline(LINE_LIMIT):
        if len(line) < LINE_LIMIT or line.endswith(b"\n"):
            yield line
            continue
        while (rest := source.readline(LINE_LIMIT)) and not rest.endswith(b"\n"):
            pass
        yield None


def parse_event(line: str | bytes) -> dict[str, Any] | None:
    """None if the line is no JSON object, or too long."""
    if len(line) > LINE_LIMIT:
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(event: Mapping[str, Any], key: str, largest: float = LARGEST_NUMBER) -> float | None:
    """None if absent, not a finite number, or beyond `largest`."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > largest:
        return None
    return float(value) if math.isfinite(value) else None


def count(event: Mapping[str, Any], key: str, largest: float = LARGEST_NUMBER) -> int | None:
    """A whole number >= 0."""
    value = number(event, key, largest)
    return int(value) if value is not None and value >= 0 and value == int(value) else None


def duration(event: Mapping[str, Any], key: str, largest: float = LARGEST) -> float | None:
    """0 to `largest`, in the field's own unit."""
    value = number(event, key, largest)
    return value if value is not None and value >= 0 else None


def text(event: Mapping[str, Any], key: str) -> str | None:
    """None if blank."""
    value = event.get(key)
    return one_line(value) if isinstance(value, str) and one_line(value).strip() else None


# Complete lines from a growing file that comes in pieces.
#
#     >>> lines = WholeLines()
#     >>> lines.of(0, b'{"step": 1}\n{"st')
#     b'{"step": 1}'
#     >>> lines.of(16, b'ep": 2}\n')
#     b'{"step": 2}'
#
# If a piece is missing, the unfinished line before it and the bytes up to the next newline are dropped.


class WholeLines:
    def __init__(self) -> None:
        self.unfinished = b""
        """At most LINE_LIMIT bytes."""
        self._end = 0
        self._is_skipping = False  # until the end of a line whose beginning is missing

    def of(self, offset: int, data: bytes) -> bytes:
        """Completed lines without the last newline. offset: of the piece in its file, in bytes."""
        if offset != self._end:
            self.unfinished, self._is_skipping = b"", True
        self._end = offset + len(data)
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            whole = whole.partition(b"\n")[2] if self._is_skipping else self.unfinished + whole
            self.unfinished, self._is_skipping = rest, False
        elif not self._is_skipping:
            self.unfinished += rest
        if len(self.unfinished) > LINE_LIMIT:
            self.unfinished, self._is_skipping = b"", True
        return whole


# A rank's waiting time for slower ranks, and its time limited by the network, per step. Pure. Over the ranks j of a
# step:
#
#     wait_j = min(exposed_j, comm_j - min_k comm_k)      sync_j = exposed_j - wait_j
#
# comm: the time with a gradient in transfer. The last rank of an exchange waits for no other, so its remaining time is
# the network's. Without overlap comm = exposed, wait = exposed_j - min_k exposed_k and sync = min_k exposed_k. With
# overlap a late rank costs the others only the time that the network, busy with earlier gradients, does not hide; a
# formula with exposed only would blame it for all. Hosts share no clock, so only durations enter.
#
# Pipeline stages measure their waiting time, the bubble, themselves.

Quantity = TypeVar("Quantity", bound=Any)
"""Milliseconds, or an SQL expression."""


def wait_and_sync(
    exposed: Quantity, comm: Quantity, least_comm: Quantity, least: Callable[[Quantity, Quantity], Quantity] = min
) -> tuple[Quantity, Quantity]:
    """least_comm: of all ranks."""
    wait = least(exposed, comm - least_comm)
    return wait, exposed - wait


def bubble_and_sync(
    exposed: Quantity, bubble: Quantity, least: Callable[[Quantity, Quantity], Quantity] = min
) -> tuple[Quantity, Quantity]:
    """For a pipeline stage."""
    wait = least(exposed, bubble)
    return wait, exposed - wait
