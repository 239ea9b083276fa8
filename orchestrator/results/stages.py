"""The stages of a pipeline: which rank held which blocks, and what is said of each stage. Pure.

    read_places(plan, starts)           # {0: Place(pipeline=0, stage=0, name="v100", first=0, last=36), ...}

Which blocks a rank holds stands in the setting `stages` of its `start` event, as the run resolved it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.planning.recorded_settings import read_settings
from orchestrator.record import Record
from trainer.shared.stages import Pipelines, parse_stages, ranks_of

Starts = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Place:
    """A rank's. name: of its stage, as the setting `stages` has it; first, last: its blocks."""

    pipeline: int
    stage: int
    name: str
    first: int
    last: int


class StageSummary(Record):
    """One stage. Times are means over its ranks and the measured steps."""

    pipeline: int
    stage: int
    """Its place in the order in which samples pass them, from 0."""
    node: str
    name: str
    """The host, or the rank of it where the host's ranks have stages of their own: `a16:1`, `rank 1`."""
    ranks: tuple[int, ...]
    first_block: int
    last_block: int
    work: float | None = None
    """Its part of the network's work on a batch, 0..1."""
    compute_ms: float | None = None
    bubble_ms: float | None = None
    """The wait for a neighbour's activations or gradients."""
    waits_for: str | None = None
    """The stage that it waited for most, by its name; None where it did not wait."""
    waits_for_ms: float | None = None
    wire_ms: float | None = None
    """With a message of its own on its way out, beside compute."""

    @property
    def blocks(self) -> str:
        return f"{self.first_block}-{self.last_block}"


def is_pipeline(plan: LaunchPlan) -> bool:
    return plan.recorded.strategy == "pipeline"


def read_places(plan: LaunchPlan, starts: Starts) -> dict[int, Place]:
    """By rank. Empty outside a pipeline, and where ranks do not say how the network was cut."""
    if not is_pipeline(plan):
        return {}
    nodes = [node.name for node in plan.nodes for _ in node.rank_numbers]
    return {
        rank: Place(pipeline, stage, one.node, one.first, one.last)
        for pipeline, stages in enumerate(_pipelines(starts))
        for stage, one in enumerate(stages)
        for rank in ranks_of(one.node, nodes)
    }


def _pipelines(starts: Starts) -> Pipelines:
    for start in starts.values():
        try:
            if found := parse_stages(read_settings(start.get("settings")).stages or ""):
                return found
        except ValueError:
            continue
    return ()
