"""The figures that a study's table may hold, each found in a run's summary. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.results.summary import Summary


@dataclass(frozen=True)
class Figure:
    title: str
    of: Callable[[Summary], float | None]
    scale: float = 1.0
    """From the summary's unit to the title's."""


def _largest(summary: Summary, *parts: str) -> float | None:
    """The largest sum, over all hosts, of these parts of a step (ms); None where none is known."""
    sums = []
    for node in summary.nodes:
        values = [getattr(node, part) for part in parts]
        if None not in values:
            sums.append(sum(values))
    return max(sums) if sums else None


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _train_s(summary: Summary) -> float | None:
    """All updates at the pace of the measured ones."""
    step_ms = _step_ms(summary)
    return None if step_ms is None else step_ms * (summary.steps + summary.warmup_steps_left_out) / 1000


def _epoch_s(summary: Summary) -> float | None:
    """The median of its epochs."""
    return statistics.median(epoch.seconds for epoch in summary.curves.epochs) if summary.curves.epochs else None


def _step_ms(summary: Summary) -> float | None:
    return _largest(summary, "load_ms", "compute_ms", "sync_ms", "wait_ms", "optim_ms")


FIGURES: dict[str, Figure] = {
    "samples_per_s": Figure("samples/s", lambda summary: summary.samples_per_s),
    "step_ms": Figure("step ms", _step_ms),
    "sync_ms": Figure("sync ms", lambda summary: _largest(summary, "sync_ms")),
    "wait_ms": Figure("wait ms", lambda summary: _largest(summary, "wait_ms")),
    "efficiency": Figure("of the sum", lambda summary: summary.efficiency),
    "train_s": Figure("train s", _train_s),
    "load_s": Figure("load s", lambda summary: _seconds(_largest(summary, "load_ms"))),
    "update_s": Figure(
        "update s", lambda summary: _seconds(_largest(summary, "compute_ms", "sync_ms", "wait_ms", "optim_ms"))
    ),
    "epoch_s": Figure("epoch s", _epoch_s),
    "total_s": Figure("total s", lambda summary: summary.total_s),
    "accuracy": Figure("accuracy %", lambda summary: None if summary.not_finite else summary.accuracy, scale=100),
}
"""What a study's table may hold; times of a step are the largest of all hosts."""
