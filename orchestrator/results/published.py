"""Figures that others published for the experiments we run, to stand beside measured ones.

Takes a `Summary`, gives tables whose first row is this run:

    [table.title for table in published_for(summary)]      # ["MNIST over GPUs and back ends", ...]

They were measured by their authors on their machines: a reference, never a target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.results.summary import Summary
from orchestrator.units import format_percent

Cells = tuple[str, ...]


@dataclass(frozen=True)
class Published:
    title: str
    hardware: str
    columns: Cells
    rows: tuple[Cells, ...]
    this_run: Callable[[Summary], Cells] | None = None
    """This run's cells for the same columns; an empty one where it has no such figure."""
    note: str = ""


def published_for(summary: Summary) -> tuple[Published, ...]:
    """The tables of the study that this run's model and data belong to; empty for a person's own script."""
    if summary.kind != "experiment":
        return ()
    return _TABLES.get((summary.recorded.model, summary.recorded.data), ())


def conditions(summary: Summary) -> str:
    """Under what this run was measured, in a few words: its figures stand beside others measured under others."""
    settings = summary.recorded
    epochs, steps = settings.epochs, settings.steps
    length = f"{steps} steps" if steps else f"{epochs} epoch{'' if epochs == 1 else 's'}" if epochs else ""
    types = ", ".join(f"{gpu.ranks} x {name}" for name, gpu in summary.by_gpu.items())
    batch = "" if settings.batch is None else f"batch {settings.batch}"
    return ", ".join(part for part in (types, length, batch) if part)


def _seconds(summary: Summary) -> str:
    return "" if summary.total_s is None else f"{summary.total_s:.2f}"


def _accuracy(summary: Summary) -> str:
    return "" if summary.accuracy is None else format_percent(summary.accuracy, 2)


def _backend_row(summary: Summary) -> Cells:
    backend = next((node.backend for node in summary.nodes if node.backend), "")
    return backend, str(summary.world_size), _seconds(summary), "", _accuracy(summary)


def _method_row(summary: Summary) -> Cells:
    ranks = "1 process" if summary.world_size == 1 else f"{summary.world_size} processes"
    settings = summary.recorded
    workers = "" if settings.num_workers is None else f"num_workers {settings.num_workers}"
    method = (settings.strategy or "", ranks, workers)
    return ", ".join(part for part in method if part), _accuracy(summary), _seconds(summary)


def _loading_row(summary: Summary) -> Cells:
    load, update = [], []
    for node in summary.nodes:
        rest = (node.compute_ms, node.sync_ms, node.wait_ms, node.optim_ms)
        if node.load_ms is not None:
            load.append(node.load_ms)
        if None not in rest:
            update.append(sum(part for part in rest if part is not None))
    times = tuple(f"{max(values) / 1000:.4f}" if values else "" for values in (load, update))
    workers = summary.recorded.num_workers
    return "" if workers is None else str(workers), *times, _seconds(summary), _accuracy(summary)


LOADING = Published(
    title="MNIST over loader processes (num_workers)",
    hardware="H100, one process, LeNet, 10 epochs, random affine augmentation",
    columns=("num_workers", "load a step (s)", "update a step (s)", "total time (s)", "accuracy"),
    rows=(
        ("0", "0.0064", "0.0011", "72.80", "99.08 %"),
        ("2", "0.0043", "0.0012", "34.96", "99.10 %"),
        ("4", "0.0005", "0.0012", "18.47", "99.07 %"),
    ),
    this_run=_loading_row,
    note="This run's update is all of a step but loading, on its slowest host.",
)
"""The study `input` runs these rows again."""

BACKENDS = Published(
    title="MNIST over GPUs and back ends",
    hardware="8 x RTX 3090, PyTorch 1.12, 10 epochs, batch 64 (most likely per process)",
    columns=("back end", "GPUs", "time (s)", "speed-up", "test accuracy"),
    rows=(
        ("NCCL", "1", "200.97", "1.00", "99.56 %"),
        ("NCCL", "2", "117.07", "1.67", "99.43 %"),
        ("NCCL", "4", "170.21", "2.22", "99.46 %"),
        ("NCCL", "8", "228.03", "2.86", "99.37 %"),
        ("Gloo", "1", "331.55", "1.25", "99.55 %"),
        ("Gloo", "2", "128.20", "1.25", "99.49 %"),
        ("Gloo", "8", "126.65", "0.83", "99.34 %"),
    ),
    this_run=_backend_row,
    note="The study's own times and speed-ups do not agree with each other; both stand here as published.",
)
"""The study `mnist_backends` runs these rows again."""

METHODS = Published(
    title="MNIST with DataParallel, DDP and one process",
    hardware="8 x H100, LeNet, 10 epochs, random affine augmentation, global batch 32 or 64",
    columns=("method", "accuracy", "total time (s)"),
    rows=(
        ("one process, num_workers 0", "99.19 %", "73"),
        ("DDP, 8 processes, num_workers 4", "98.93 %", "26"),
        ("DataParallel, 8 GPUs", "98.94 %", "161"),
        ("DDP with 1 process, num_workers 4", "99.09 %", "20.27"),
        ("one process, num_workers 4", "99.07 %", "18.47"),
        ("DDP with 1 process, num_workers 0", "99.09 %", "75.58"),
    ),
    this_run=_method_row,
    note="Loading and augmenting set the pace there, not computing: the gain was the loader processes'.",
)
"""The study `mnist_methods` runs these rows again."""

MIXED = Published(
    title="ResNet-152 on CIFAR-10 over mixed clusters",
    hardware="RTX 3090, RTX A2000, A16 and Tesla V100-16GB hosts, 2.5 Gbps, PyTorch 2.0.1",
    columns=(),
    rows=(),
    note="The study gives no times. Its claim: DDP's buckets, which travel during backward, beat one all-reduce "
    "call a parameter after it. Run both strategies and compare them to see it.",
)

_TABLES: dict[tuple[str | None, str | None], tuple[Published, ...]] = {
    ("lenet", "mnist"): (BACKENDS, METHODS, LOADING),
    ("resnet152", "cifar10"): (MIXED,),
}
"""By the settings `model` and `data`."""
