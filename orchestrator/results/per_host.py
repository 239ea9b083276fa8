"""What each host of a run did, and each type of GPU: speeds, times of a step, memory, how its ranks ended.

nodes = node_summaries(plan, figures, events, run, solo={})
efficiency(speed, nodes)                # (0.44, "estimated"): of the sum of what its hosts can do alone
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from orchestrator.jobs.metric_lines import count, text
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.record import RECORD_LIMIT
from orchestrator.results.events import Events
from orchestrator.results.gpu_use import read_gpu_use
from orchestrator.results.measure import Figures, RankFigures, gpu_label
from orchestrator.results.summary import GpuSummary, NodeSummary, RankEnd


def node_summaries(
    plan: LaunchPlan, figures: Figures, events: Events, run: RunFolder, solo: Mapping[str, float]
) -> tuple[NodeSummary, ...]:
    """solo: samples/s that a node did alone, by node, in place of what its profile in the plan says."""
    measured = (
        _node_summary(node, figures, events, solo.get(node.name, node.solo_samples_per_s or None))
        for node in plan.nodes
    )
    return tuple(_as_seen_by_its_host(node, plan, run) for node in measured)


def cluster_speed(figures: Figures) -> float | None:
    """Samples/s of all measured steps; None where none was measured, or no samples are known."""
    return over(sum(rank.samples for rank in figures.ranks.values()), figures.wall_s) or None


def _node_summary(node: NodePlan, figures: Figures, events: Events, solo: float | None) -> NodeSummary:
    numbers = node.rank_numbers
    mine = figures.of(node)
    starts, ends = events.latest("start"), events.latest("end")
    start = next((starts[rank] for rank in numbers if rank in starts), {})
    own = [_own_speed(rank, figures.steps) for rank in mine]
    memory = [size for rank in numbers if (size := count(ends.get(rank, {}), "peak_memory_bytes")) is not None]
    return NodeSummary(
        name=node.name,
        gpu=gpu_label(node),
        ranks=node.ranks,
        batch_per_rank=_batch_per_rank(node, start, figures),
        samples_per_s=over(sum(rank.samples for rank in mine), figures.wall_s) if len(mine) == node.ranks else None,
        own_samples_per_s=_sum(own) if len(mine) == node.ranks else None,
        solo_samples_per_s=solo,
        step_ms=figures.step_ms.get(node.name),
        load_ms=_mean(rank.load_ms for rank in mine),
        compute_ms=_mean(rank.compute_ms for rank in mine),
        sync_ms=_mean(rank.sync_ms for rank in mine),
        wait_ms=_mean(rank.wait_ms for rank in mine),
        optim_ms=_mean(rank.optim_ms for rank in mine),
        peak_memory_bytes=max(memory, default=None),
        paced=node.paced is not None,
        valid=node.paced is None or all(ends.get(rank, {}).get("valid") is True for rank in numbers),
        host=text(start, "host"),
        device_name=text(start, "device_name"),
        torch=text(start, "torch"),
        nccl=text(start, "nccl"),
        backend=text(start, "backend"),
        bandwidth_bps=node.bandwidth_bps,
        system=node.system,
    )


def _own_speed(rank: RankFigures, steps: int) -> float | None:
    """Samples/s by what is the rank's own of a step: loading, computing and the update, as far as it reports them."""
    if rank.compute_total_ms is None:
        return None
    return over(rank.samples, (rank.compute_total_ms + steps * ((rank.load_ms or 0) + (rank.optim_ms or 0))) / 1000)


def _batch_per_rank(node: NodePlan, start: Mapping[str, Any], figures: Figures) -> int | None:
    """As its first rank reports it, else as `--batch` split it, else a script's mean over the measured steps."""
    reported = count(start, "batch_per_rank")
    if reported is not None:
        return reported
    if node.shares:
        return node.shares[0]
    samples = [rank.samples for rank in figures.of(node)[:1]]
    return round(samples[0] / figures.steps) if samples and figures.steps else None


def _as_seen_by_its_host(node: NodeSummary, plan: LaunchPlan, run: RunFolder) -> NodeSummary:
    """With what its supervisor noted: use and memory of the GPUs, and how every rank ended."""
    gpu = read_gpu_use(run.gpu(node.name))
    memory = gpu.memory_bytes if node.peak_memory_bytes is None else node.peak_memory_bytes
    ends = tuple(_rank_ends(run.agent(node.name), plan.node(node.name)))
    update = {"gpu_utilisation": gpu.utilisation, "peak_memory_bytes": memory, "slowed": gpu.slowed, "ends": ends}
    return node.model_copy(update=update)


def _rank_ends(agent: Path, node: NodePlan) -> Iterable[RankEnd]:
    """agent: the supervisor's record, written on the host and not taken on trust."""
    record: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError), open(agent, "rb") as file:
        record = json.loads(file.read(RECORD_LIMIT))
    ranks = record.get("ranks") if isinstance(record, dict) else None
    for rank in node.rank_numbers:
        end = ranks.get(str(rank)) if isinstance(ranks, dict) else None
        known = {key: end.get(key) for key in ("exit_code", "signal")} if isinstance(end, dict) else {}
        try:
            yield RankEnd(rank=rank, **known)
        except ValidationError:
            yield RankEnd(rank=rank)


def efficiency(
    speed: float | None, nodes: tuple[NodeSummary, ...]
) -> tuple[float | None, Literal["solo", "estimated"] | None]:
    """The cluster's speed over the sum of its hosts', and what that sum was made of."""
    solo = _sum(node.solo_samples_per_s for node in nodes)
    own = _sum(node.own_samples_per_s for node in nodes)
    parts = solo or own
    return (speed / parts, "solo" if solo else "estimated") if speed is not None and parts else (None, None)


def by_gpu(nodes: tuple[NodeSummary, ...], plan: LaunchPlan, figures: Figures) -> dict[str, GpuSummary]:
    total = sum(rank.samples for rank in figures.ranks.values()) if len(figures.ranks) == plan.world_size else 0
    samples = {node.name: sum(rank.samples for rank in figures.of(node)) for node in plan.nodes}
    kinds: dict[str, list[NodeSummary]] = {}
    for node in nodes:
        kinds.setdefault(node.gpu, []).append(node)
    return {
        gpu: GpuSummary(
            nodes=len(group),
            ranks=sum(node.ranks for node in group),
            samples_per_s=_sum(node.samples_per_s for node in group),
            own_samples_per_s=_sum(node.own_samples_per_s for node in group),
            share=over(sum(samples[node.name] for node in group), total),
        )
        for gpu, group in kinds.items()
    }


def over(count: float, amount: float) -> float | None:
    return count / amount if amount > 0 else None


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum; None as soon as one is unknown, or when there are none."""
    known = list(values)
    return sum(value for value in known if value is not None) if known and None not in known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = list(values)
    total = _sum(known)
    return None if total is None else total / len(known)
