"""What each stage of a pipeline did in a run: computing, waiting for its neighbours, sending. Pure.

stage_summaries(plan, starts, figures)      # (StageSummary(node="v100", compute_ms=180.0, bubble_ms=12.0, ...), ...)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.jobs.metric_lines import number
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.results.measure import Figures, RankFigures
from orchestrator.results.stages import StageSummary, Starts, read_places


def stage_summaries(plan: LaunchPlan, starts: Starts, figures: Figures) -> tuple[StageSummary, ...]:
    """starts: each rank's last `start`. In the order in which samples pass them, pipeline by pipeline."""
    places = read_places(plan, starts)
    node_of = {rank: node.name for node in plan.nodes for rank in node.rank_numbers}
    stages: dict[tuple[int, int], list[int]] = {}
    for rank, place in sorted(places.items()):
        stages.setdefault((place.pipeline, place.stage), []).append(rank)
    names = {key: _name(places[ranks[0]].name, node_of) for key, ranks in stages.items()}
    return tuple(
        StageSummary(
            pipeline=key[0],
            stage=key[1],
            node=node_of[ranks[0]],
            name=names[key],
            ranks=tuple(ranks),
            first_block=places[ranks[0]].first,
            last_block=places[ranks[0]].last,
            work=_sum([number(starts.get(rank, {}), "work") for rank in ranks]),
            **_times([figures.ranks[rank] for rank in ranks if rank in figures.ranks], key, names),
        )
        for key, ranks in sorted(stages.items())
    )


def _name(stage: str, node_of: Mapping[int, str]) -> str:
    """As the setting `stages` has it, or `rank 1` where all ranks are on one host, which it names by their numbers."""
    return f"rank {stage}" if stage.isdecimal() and stage not in node_of.values() else stage


def _times(ranks: Sequence[RankFigures], key: tuple[int, int], names: Mapping[tuple[int, int], str]) -> dict[str, Any]:
    before_ms = _mean([rank.bubble_before_ms for rank in ranks])
    behind_ms = _mean([rank.bubble_behind_ms for rank in ranks])
    times: dict[str, Any] = {
        "compute_ms": _mean([rank.compute_ms for rank in ranks]),
        "wire_ms": _mean([rank.wire_ms for rank in ranks]),
    }
    if before_ms is None or behind_ms is None:
        return times
    most_ms, step = max((before_ms, -1), (behind_ms, 1))
    neighbour = names.get((key[0], key[1] + step)) if most_ms > 0 else None
    return {**times, "bubble_ms": before_ms + behind_ms, "waits_for": neighbour, "waits_for_ms": most_ms}


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value) and 0 <= value <= 1]
    return sum(known) if known and len(known) == len(values) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
