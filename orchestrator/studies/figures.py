"""Figures and cells for the tables of studies, each read from a run's summary. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.results.summary import Summary
from orchestrator.units import format_figure
from trainer.shared.fields import not_among


@dataclass(frozen=True)
class Figure:
    title: str
    of: Callable[[Summary], float | None]
    digits: int | None = None
    """Decimals, as many as published figures have; None writes a figure as everywhere else."""
    scale: float = 1.0
    """From the summary's unit to the title's."""

    def shown(self, value: float) -> str:
        return format_figure(value) if self.digits is None else f"{value * self.scale:.{self.digits}f}"


def _largest(summary: Summary, *parts: str) -> float | None:
    """The largest sum, over all hosts, of these parts of a step (ms); None if no host has all of them."""
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


def _update_s(summary: Summary) -> float | None:
    return _seconds(_largest(summary, "compute_ms", "sync_ms", "wait_ms", "optim_ms"))


FIGURES: dict[str, Figure] = {
    "samples_per_s": Figure("samples/s", lambda summary: summary.samples_per_s),
    "step_ms": Figure("step ms", _step_ms),
    "sync_ms": Figure("sync ms", lambda summary: _largest(summary, "sync_ms")),
    "wait_ms": Figure("wait ms", lambda summary: _largest(summary, "wait_ms")),
    "efficiency": Figure("of the sum", lambda summary: summary.efficiency, digits=3),
    "train_s": Figure("train s", _train_s, digits=2),
    "load_s": Figure("load s", lambda summary: _seconds(_largest(summary, "load_ms")), digits=4),
    "update_s": Figure("update s", _update_s, digits=4),
    "epoch_s": Figure("epoch s", _epoch_s, digits=2),
    "total_s": Figure("total s", lambda summary: summary.total_s, digits=2),
    "accuracy": Figure(
        "accuracy %", lambda summary: None if summary.not_finite else summary.accuracy, digits=2, scale=100
    ),
}
"""Measured columns of a study's table; times of a step are the largest of all hosts."""


def _num_workers(summary: Summary) -> str:
    number = summary.recorded.num_workers
    return "" if number is None else str(number)


def _method(summary: Summary) -> str:
    ranks = "1 process" if summary.world_size == 1 else f"{summary.world_size} processes"
    workers = _num_workers(summary)
    parts = (summary.recorded.strategy, ranks, f"num_workers {workers}" if workers else "")
    return ", ".join(part for part in parts if part)


_WORDS: dict[str, Callable[[Summary], str]] = {
    "backend": lambda summary: next((node.backend for node in summary.nodes if node.backend), ""),
    "ranks": lambda summary: str(summary.world_size),
    "num_workers": _num_workers,
    "method": _method,
}
"""Further columns of the report: what a run was."""


def cell_of_run(name: str | None, summary: Summary) -> str:
    """A run's cell in the report beside published ones; empty if the run has no such figure."""
    if name is None:
        return ""
    if name in _WORDS:
        return _WORDS[name](summary)
    value = FIGURES[name].of(summary)
    if value is None:
        return ""
    return f"{FIGURES[name].shown(value)} %" if name == "accuracy" else FIGURES[name].shown(value)


def study_figure(name: str) -> str:
    """Raises ValueError for a name that is no figure."""
    if name not in FIGURES:
        raise ValueError(not_among(name, FIGURES))
    return name


def report_figure(name: str) -> str:
    """Raises ValueError for a name that is no figure or column of the report."""
    return name if name in _WORDS else study_figure(name)
