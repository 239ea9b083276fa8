"""What a run amounts to, as other programs take it: values over steps, figures of the whole run, settings. Pure.

for scalar in scalars(summary):     Scalar(name="loss/training", step=119, seconds=4.468, value=2.31)
whole_run(summary)                  {"run/samples_per_s": 1122.0, "run/efficiency": 0.96, ...}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from orchestrator.results.figure_tables import figure_tables
from orchestrator.results.summary import Summary
from orchestrator.text import one_line

DRAWN = (
    ("loss", "loss", "loss/training"),
    ("evaluations", "loss", "loss/test"),
    ("evaluations", "accuracy", "accuracy/test"),
    ("speeds", "samples_per_s", "samples_per_s"),
)
"""Table of `figure_tables`, its column, and what the values are called; those of hosts end in the host's name."""
OF_HOST = ("samples_per_s", "own_samples_per_s", "load_ms", "compute_ms", "sync_ms", "wait_ms", "optim_ms")


@dataclass(frozen=True)
class Scalar:
    name: str
    step: int
    seconds: float | None
    """Since the first update began; None where no rank said when its updates were over."""
    value: float


def scalars(summary: Summary) -> Iterator[Scalar]:
    """By name, in the order of steps."""
    tables = figure_tables(summary)
    for title, column, name in DRAWN:
        if title not in tables:
            continue
        for row in tables[title].rows:
            cells = dict(zip(tables[title].columns, row, strict=True))
            if cells[column] is not None:
                of = f"{name}/{one_line(cells['host'], 60)}" if "host" in cells else name
                yield Scalar(of, cells["step"], cells["seconds"], float(cells[column]))


def whole_run(summary: Summary) -> dict[str, float]:
    """Figures without which step they belong to; what is not known is not there."""
    found = {
        "samples_per_s": summary.samples_per_s,
        "efficiency": summary.efficiency,
        "accuracy": summary.accuracy,
        "loss": summary.loss,
        "first_update_not_finite": summary.not_finite.step if summary.not_finite else None,
        "total_s": summary.total_s,
        "measured_steps": summary.steps,
    }
    for node in summary.nodes:
        name = one_line(node.name, 60)
        found |= {f"{field}/{name}": getattr(node, field) for field in OF_HOST}
    return {f"run/{name}": float(value) for name, value in found.items() if value is not None}


def settings_words(summary: Summary) -> dict[str, str]:
    """As the ranks used them, and what else says how it was run."""
    words = {one_line(key, 60): one_line(str(value), 400) for key, value in summary.settings.items()}
    hosts = ", ".join(f"{node.name} ({node.ranks} x {node.gpu})" for node in summary.nodes)
    return {**words, "hosts": one_line(hosts, 400), "cluster": one_line(summary.cluster, 60)}


def began_at(summary: Summary) -> float:
    """Unix time of the run's start; 0 where no record says it."""
    try:
        return datetime.fromisoformat((summary.started or summary.created or "").replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
