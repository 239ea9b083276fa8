"""Lines that a host wrote as JSON events (metrics.jsonl, gpu.jsonl), read leniently: nothing in them is trusted.

    for line in whole_lines(file):
        if line and (event := parse_event(line)):
            step, t_ms = count(event, "step"), duration(event, "t_ms")      # None where the line holds no such number

Which events and fields there are stands in `trainer.shared.metrics`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, TypeVar

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


# Complete lines from a growing file that comes in pieces.
#
# >>> lines = WholeLines()
# >>> lines.of(0, b'{"step": 1}\n{"st')
# b'{"step": 1}'
# >>> lines.of(16, b'ep": 2}\n')
# b'{"step": 2}'
#
# If a piece is missing, the unfinished line before it is dropped, and the bytes up to the next newline.


class WholeLines:
    def __init__(self) -> None:
        self.unfinished = b""
        """The beginning of a line whose end has not come; at most LINE_LIMIT bytes."""
        self._end = 0
        self._is_skipping = False  # until the end of a line whose beginning is not here

    def of(self, offset: int, data: bytes) -> bytes:
        """The lines that this piece completes, without the last newline; b"" if none. offset: where in its file the
        piece begins, in bytes.
        """
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


# How much of a step a rank waited for slower ranks, and how much the network alone held it up. Pure.
#
# In each step, over its ranks j:
#
#     wait_j = min(exposed_j, comm_j - min_k comm_k)      sync_j = exposed_j - wait_j
#
# comm is the time with a gradient under way: the rank that arrives last at an exchange waits for nobody there, so what
# it
# still spends is the network's. Where nothing overlaps, comm is exposed, wait is exposed_j - min_k exposed_k and sync
# is
# min_k exposed_k. Where backward runs on beside the exchange, a late rank costs the others only what the network, busy
# with earlier gradients, does not hide; exposed alone would blame it for all. Only durations enter: hosts share no
# clock.
#
# The stages of a pipeline meet nowhere: what each waits for its neighbours, its bubble, it measures itself, and that is
# its wait.

Quantity = TypeVar("Quantity", bound=Any)
"""Milliseconds, or an expression over columns that hold them."""


def wait_and_sync(
    exposed: Quantity, comm: Quantity, least_comm: Quantity, least: Callable[[Quantity, Quantity], Quantity] = min
) -> tuple[Quantity, Quantity]:
    """The wait and the sync time of one rank in one step. least_comm: the shortest comm of all ranks in this step.

    least: returns the smaller of two quantities.
    """
    wait = least(exposed, comm - least_comm)
    return wait, exposed - wait


def bubble_and_sync(
    exposed: Quantity, bubble: Quantity, least: Callable[[Quantity, Quantity], Quantity] = min
) -> tuple[Quantity, Quantity]:
    """The same of a stage of a pipeline."""
    wait = least(exposed, bubble)
    return wait, exposed - wait
