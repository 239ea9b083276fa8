"""How busy and how full a host's GPUs were: its gpu.jsonl in, two figures out. Pure.

    read_gpu_use(run.gpu("v100"))       # GpuUse(utilisation=93.5, memory_bytes=12884901888)

The file is what `remote/gpus.py` wrote on the host, and as little trusted as any other: a line that is no reading, or
holds an impossible number, counts for nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.events import number

LINE_LIMIT = 4096
LARGEST_MEMORY = 2**50


@dataclass(frozen=True)
class GpuUse:
    """utilisation: mean over the GPUs and all readings, 0..100. memory_bytes: the most that one GPU held at a time.

    None where no reading tells it.
    """

    utilisation: float | None = None
    memory_bytes: int | None = None


def read_gpu_use(path: Path) -> GpuUse:
    """A file that is not there is a host of whose GPUs nothing is known."""
    used, readings, memory = 0.0, 0, None
    with contextlib.suppress(OSError):
        for event in _events(path):
            share, held = number(event, "utilisation"), number(event, "memory_bytes")
            if share is not None and 0 <= share <= 100:
                used, readings = used + share, readings + 1
            if held is not None and 0 <= held <= LARGEST_MEMORY:
                memory = max(memory or 0, int(held))
    return GpuUse(used / readings if readings else None, memory)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        while line := file.readline(LINE_LIMIT):
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") == "gpu":
                    yield event
