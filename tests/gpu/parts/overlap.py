"""Whether gradients travel beside backward, by the kernels as CUPTI saw them: through torch.profiler, else nsys."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import expected
from ..network import shaped
from ..row import Row, failed, figure, skipped
from ..runs import RESNET, Done
from . import Bench

_STEPS, _LIMIT_S = 9, 40
_WHAT = "ddp: kernels' time beside a sum"
"""As a part of the time of all that are no collective."""


class Kernel(NamedTuple):
    """begin_us, end_us: on the GPU's clock."""

    name: str
    begin_us: float
    end_us: float

    @property
    def is_collective(self) -> bool:
        return "nccl" in self.name.lower()


def play(bench: Bench) -> Iterator[Row]:
    if bench.facts.is_stand_in:
        yield skipped(_WHAT, "CUPTI asks the driver, and the stand-in has none")
        return
    trace = bench.folder / "trace-{rank}.json"
    done = _run(bench, "overlap-cupti", GPU_TRACE=str(trace))
    file = Path(str(trace).replace("{rank}", "0"))
    kernels = of_trace(file) if file.exists() else []
    tool = "torch.profiler"
    if not kernels and shutil.which("nsys"):
        kernels, tool = _by_nsys(bench), "nsys"
    for scratch in bench.folder.glob("trace-*.json"):
        scratch.unlink()
    keep(kernels, bench.folder / "kernels.csv")
    if not done.succeeded and not kernels:
        yield failed(_WHAT, done.cause)
    elif not any(kernel.is_collective for kernel in kernels):
        seen = f"{len(kernels)} kernels, none of them NCCL's" if kernels else "no kernel"
        yield skipped(_WHAT, f"CUPTI showed {seen}" + ("" if shutil.which("nsys") else "; there is no nsys to ask"))
    else:
        yield figure(_WHAT, share_beside(kernels), "", expected.SHARE_BESIDE, f"{len(kernels)} kernels, by {tool}")


def _run(bench: Bench, name: str, *before: str, **environment: str) -> Done:
    """before: a command that watches the ranks."""
    prefix, _ = shaped()
    size = ("--backend", "nccl", "--batch", "256", "--samples", "4096", "--steps", str(_STEPS))
    ways = ("--strategy", "ddp")
    return bench.runs.pair(name, *RESNET, *size, *ways, limit_s=_LIMIT_S, prefix=(*prefix, *before), **environment)


def of_trace(file: Path) -> list[Kernel]:
    kernels = events_of(file, "kernel")
    return [Kernel(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in kernels]


def events_of(file: Path, kind: str) -> list[Any]:
    """Of a trace in Chrome's format, as torch.profiler writes it."""
    try:
        events = json.loads(file.read_text(encoding="utf-8", errors="replace")).get("traceEvents", [])
    except ValueError:
        return []
    return [event for event in events if str(event.get("cat", "")).lower() == kind]


def _by_nsys(bench: Bench) -> list[Kernel]:
    report = bench.folder / "nsys"
    _run(bench, "overlap-nsys", "nsys", "profile", "--trace=cuda", "--sample=none", "-f", "true", "-o", str(report))
    command = ["nsys", "stats", "-q", "-r", "cuda_gpu_trace", "--format", "csv", f"{report}.nsys-rep"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, bench.runs.left_s))
    except (OSError, subprocess.TimeoutExpired):
        return []
    finally:
        for scratch in bench.folder.glob("nsys.*"):
            scratch.unlink()
    return of_nsys(done.stdout)


def of_nsys(table: str) -> list[Kernel]:
    """Of `nsys stats -r cuda_gpu_trace --format csv`, in ns; copies are left out. One process's, by its context."""
    begin = table.find("Start (ns)")
    rows = list(csv.DictReader(io.StringIO(table[begin:]))) if begin >= 0 else []
    kernels = [row for row in rows if not row["Name"].startswith("[CUDA ")]
    first = kernels[0].get("Ctx") if kernels else None
    return [
        Kernel(
            row["Name"], float(row["Start (ns)"]) / 1e3, (float(row["Start (ns)"]) + float(row["Duration (ns)"])) / 1e3
        )
        for row in kernels
        if row.get("Ctx") == first
    ]


def share_beside(kernels: Sequence[Kernel]) -> float:
    """The part of the other kernels' time that lies within an NCCL kernel."""
    collectives = sorted((kernel.begin_us, kernel.end_us) for kernel in kernels if kernel.is_collective)
    others = [kernel for kernel in kernels if not kernel.is_collective]
    total_us = sum(kernel.end_us - kernel.begin_us for kernel in others)
    beside_us = sum(_covered_us(kernel, collectives) for kernel in others)
    return beside_us / total_us if total_us else 0.0


def _covered_us(kernel: Kernel, spans: Sequence[tuple[float, float]]) -> float:
    """spans: by their begin; they may overlap."""
    covered, reached = 0.0, kernel.begin_us
    for begin, end in spans:
        if begin >= kernel.end_us:
            break
        begin, end = max(begin, reached), min(end, kernel.end_us)
        if end > begin:
            covered, reached = covered + end - begin, end
    return covered


def keep(kernels: Sequence[Kernel], file: Path) -> None:
    """Small enough to send: one line a kernel."""
    first = min((kernel.begin_us for kernel in kernels), default=0.0)
    with open(file, "w", newline="", encoding="utf-8") as output:
        table = csv.writer(output)
        table.writerow(["begin_us", "end_us", "kernel"])
        table.writerows(
            [f"{kernel.begin_us - first:.1f}", f"{kernel.end_us - first:.1f}", kernel.name[:80]] for kernel in kernels
        )
