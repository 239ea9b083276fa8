"""What a host's GPUs were doing while a job ran: read from the gpu.jsonl that its supervisor wrote.

    read_gpu_use(run.gpu("v100"))       # GpuUse(utilisation=93.5, memory_bytes=12884901888, slowed=None)

A line that is no reading counts for nothing (`jobs/gpu_reading.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.jobs.gpu_reading import GpuLines, Reading
from orchestrator.jobs.metric_lines import parse_event, whole_lines
from orchestrator.results.slowed import Slowed, Slowing


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
    """In the order of the file; none where there is no file."""
    lines = GpuLines()
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in whole_lines(file):
            if line and (reading := lines.reading(parse_event(line))):
                yield reading
