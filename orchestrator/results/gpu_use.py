"""What a host's GPUs were doing while a job ran: read from the gpu.jsonl that its supervisor wrote.

    read_gpu_use(run.gpu("v100"))       # GpuUse(utilisation=93.5, memory_bytes=12884901888, slowed=None)

The file is what `remote/gpus.py` wrote on the host, and as little trusted as any other: a line that is no reading, or
holds an impossible number, counts for nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.jobs.metric_lines import count, number, parse_event, whole_lines
from orchestrator.results.gpu_reading import Reading
from orchestrator.results.slowed import Slowed, Slowing

# The largest that a number may be, and be one that a GPU can have.
MOST = {"utilisation": 100, "memory_bytes": 2**50, "sm_mhz": 1e5, "watts": 1e5, "celsius": 1e3, "slowed_by": 2**64}
MOST_LIMITS = {"max_sm_mhz": 1e5, "limit_watts": 1e5}


@dataclass(frozen=True)
class GpuUse:
    """How one host used its GPUs; None for what no reading shows."""

    utilisation: float | None = None
    """Mean over the GPUs and all readings, 0..100."""
    memory_bytes: int | None = None
    """The most that one GPU held at a time."""
    slowed: Slowed | None = None
    """What held the most of them down for a part of the run that matters."""


def read_gpu_use(path: Path) -> GpuUse:
    """A file that is not there is a host of whose GPUs nothing is known."""
    used, known, memory, slowing = 0.0, 0, None, Slowing()
    for reading in readings(path):
        if reading.utilisation is not None:
            used, known = used + reading.utilisation, known + 1
        if reading.memory_bytes is not None:
            memory = max(memory or 0, int(reading.memory_bytes))
        slowing.add(reading)
    return GpuUse(used / known if known else None, memory, slowing.found())


def readings(path: Path) -> Iterator[Reading]:
    """In the order of the file; none where there is no file. A limit holds until another one is reported."""
    limits: dict[tuple[int, int | None], dict[str, float | None]] = {}
    with contextlib.suppress(OSError):
        for event in _events(path):
            rank, index = count(event, "rank") or 0, count(event, "index")
            if event.keys() & MOST_LIMITS.keys() or (rank, index) not in limits:
                limits[rank, index] = {name: _within(event, name, most) for name, most in MOST_LIMITS.items()}
            values = {name: _within(event, name, most) for name, most in MOST.items()}
            slowed_by = count(event, "slowed_by") if values.pop("slowed_by") is not None else None
            wall, limit = number(event, "wall"), limits[rank, index]
            yield Reading(rank=rank, index=index, wall=wall, slowed_by=slowed_by, **values, **limit)


def _within(event: dict[str, Any], name: str, most: float) -> float | None:
    value = number(event, name)
    return value if value is not None and 0 <= value <= most else None


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for line in whole_lines(file):
            event = parse_event(line) if line else None
            if event and event.get("event") == "gpu":
                yield event
