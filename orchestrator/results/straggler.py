"""The straggler for which the others wait, the bottleneck of a step, and GPU use.

find_straggler(plan, figures)   # Straggler(node="a2000", reason="takes 2.5x as long per sample as v100", ...)
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.jobs.live_stats import GpuLines, Reading
from orchestrator.jobs.metric_lines import parse_event, whole_lines
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.results.measure import Figures, RankFigures
from orchestrator.results.summary import Bound, Part, Slowed, Slowing, Straggler
from orchestrator.results.timeline import is_pipeline
from orchestrator.units import format_figure

NOISE = 0.05
"""Part of a step: shorter waits name no straggler."""
UNREPEATED = 0.5
"""For a single measured step, whose noise is unknown."""
# Student's t at 99 %, two-sided, for 1 to 9 degrees of freedom.
STUDENT = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25)


def find_straggler(plan: LaunchPlan, figures: Figures) -> Straggler | None:
    """The host, or on a single host the rank, that waits least. The others have to wait longer than the noise: if hosts
    are late by turns, all wait, and of two equal hosts one is always slightly slower.
    """
    node_of = {rank: node.name for node in plan.nodes for rank in node.rank_numbers}
    last = _last(plan, figures)
    if last is None:
        return None
    by_node = len(plan.nodes) > 1
    others = [rank for rank in node_of if (node_of[rank] != node_of[last] if by_node else rank != last)]
    if not others:
        return None
    wait_ms = _mean(figures.ranks[rank].wait_ms for rank in others) - (figures.ranks[last].wait_ms or 0.0)
    if wait_ms <= 0 or _is_noise(wait_ms, figures, last, others):
        return None
    names = {node_of[rank] for rank in others}
    label = "the other ranks" if not by_node else names.pop() if len(names) == 1 else "the others"
    ranks = figures.ranks[last], [figures.ranks[rank] for rank in others]
    reason = _reason_of_stage(*ranks, label) if is_pipeline(plan) else _reason(*ranks, label, wait_ms)
    if not reason:
        return None
    slow = plan.recorded.slow or ""
    if f"rank:{last}" in slow.split(","):
        reason += f" (slow={slow} was asked for)"
    return Straggler(node=node_of[last], rank=None if by_node else last, reason=reason, wait_ms=wait_ms)


def _is_noise(wait_ms: float, figures: Figures, last: int, others: Sequence[int]) -> bool:
    """Whether the wait is small, below the spread of the host's compute times, or varies over the run. The last by
    batch means (A. M. Law, Simulation Modeling and Analysis).
    """
    step_ms = figures.ranks[last].total_ms / figures.steps
    if wait_ms < max(NOISE * step_ms, figures.ranks[last].compute_spread_ms or 0.0):
        return True
    stretches = zip(*(figures.stretch_wait_ms[rank] for rank in (last, *others)), strict=False)
    more_ms = [_mean(waits[1:]) - waits[0] for waits in stretches]
    if len(more_ms) < 2:
        return wait_ms < UNREPEATED * step_ms
    error_ms: float = statistics.stdev(more_ms) / math.sqrt(len(more_ms))
    return wait_ms < STUDENT[len(more_ms) - 2] * error_ms


def find_bound(plan: LaunchPlan, figures: Figures) -> Bound | None:
    """The largest part of a step of the rank that waits least: it determines every rank's step."""
    last = _last(plan, figures)
    if last is None:
        return None
    rank = figures.ranks[last]
    parts: dict[Part, float | None]
    parts = {"input": rank.load_ms, "compute": rank.compute_ms, "wire": rank.sync_ms, "optimiser": rank.optim_ms}
    known = {part: ms for part, ms in parts.items() if ms is not None}
    step_ms = rank.total_ms / figures.steps
    if len(known) < len(parts) or step_ms <= 0:
        return None
    part = max(known, key=lambda name: known[name])
    node = next(node.name for node in plan.nodes if last in node.rank_numbers)
    return Bound(part=part, node=node, share=min(1.0, known[part] / step_ms), observed=figures.observed)


def _last(plan: LaunchPlan, figures: Figures) -> int | None:
    """None if any wait is unknown."""
    waits = {number: rank.wait_ms for number, rank in figures.ranks.items() if rank.wait_ms is not None}
    return min(waits, key=lambda rank: waits[rank]) if waits and len(waits) == plan.world_size else None


def _reason_of_stage(last: RankFigures, others: list[RankFigures], label: str) -> str:
    """The others wait for the stage whose blocks take longest. "" if its blocks are no slower: ranks wait while the
    pipeline fills and drains.
    """
    compute, other_compute = last.compute_ms or 0.0, _mean(rank.compute_ms for rank in others)
    if compute <= (1 + NOISE) * other_compute:
        return ""
    return f"computes {format_figure(compute)} ms a step for its blocks, {label} {format_figure(other_compute)} ms"


def _reason(last: RankFigures, others: list[RankFigures], label: str, wait_ms: float) -> str:
    load, other_load = last.load_ms or 0.0, _mean(rank.load_ms for rank in others)
    compute, other_compute = last.compute_ms or 0.0, _mean(rank.compute_ms for rank in others)
    if load - other_load > max(compute - other_compute, wait_ms / 2):
        return f"loads data for {format_figure(load)} ms a step, {label} for {format_figure(other_load)} ms"
    per_sample, other_per_sample = _per_sample_ms([last]), _per_sample_ms(others)
    if per_sample and other_per_sample and per_sample > 1.05 * other_per_sample:
        return f"takes {per_sample / other_per_sample:.1f}x as long per sample as {label}"
    if compute > 1.05 * other_compute:
        return f"computes {format_figure(compute)} ms a step for its share, {label} {format_figure(other_compute)} ms"
    return f"arrives last at the gradient exchange, though it loads and computes as fast as {label}"


def _per_sample_ms(ranks: list[RankFigures]) -> float | None:
    samples = sum(rank.samples for rank in ranks)
    return sum(rank.compute_total_ms or 0.0 for rank in ranks) / samples if samples else None


def _mean(values: Iterable[float | None]) -> float:
    """0 without known values."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


# GPU use of a host, from the gpu.jsonl of its supervisor.
#
#     read_gpu_use(run.gpu("v100"))       # GpuUse(utilisation=93.5, memory_bytes=12884901888, slowed=None)


@dataclass(frozen=True)
class GpuUse:
    utilisation: float | None = None
    """0..100."""
    memory_bytes: int | None = None
    slowed: Slowed | None = None


def read_gpu_use(path: Path) -> GpuUse:
    used, known, memory, slowing = 0.0, 0, None, Slowing()
    for reading in readings(path):
        if reading.utilisation is not None:
            used, known = used + reading.utilisation, known + 1
        if reading.memory_bytes is not None:
            memory = max(memory or 0, int(reading.memory_bytes))
        slowing.add(reading)
    return GpuUse(used / known if known else None, memory, slowing.found())


def readings(path: Path) -> Iterator[Reading]:
    lines = GpuLines()
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in whole_lines(file):
            if line and (reading := lines.reading(parse_event(line))):
                yield reading
