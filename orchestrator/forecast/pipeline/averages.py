"""Pipelines beside each other that average their weights instead of adding up gradients: `fidelity=local`. Pure.

    joined_s(chain, courses, wire, Averages(every=32, overlap=8))       seconds of an update

Each pipeline makes updates of its own, so none waits for another but at an average, which all make after the same
number of updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.forecast.links import LinkCosts
from orchestrator.forecast.pipeline.chain import Chain
from orchestrator.forecast.pipeline.clock import update_seconds
from orchestrator.forecast.pipeline.course import Course
from orchestrator.forecast.pipeline.sums import sums_of
from trainer.shared import gpu_work


@dataclass(frozen=True)
class Averages:
    """every: updates from one average to the next. overlap: those that go on while it travels. half: in 16 bits."""

    every: int
    overlap: int = 0
    half: bool = False


def joined_s(chain: Chain, courses: Sequence[Course], wire: LinkCosts, averages: Averages | None) -> float:
    """An update, the mean over those from one average to the next. averages: None where gradients add up, update by
    update.
    """
    if averages is None:
        return update_seconds(chain, courses, wire)
    own_s = max(update_seconds(chain, [course], wire) for course in courses)
    travels_s, copies_s = _average_s(chain, courses, wire, averages)
    return own_s + (copies_s + max(0.0, travels_s - averages.overlap * own_s)) / averages.every


def _average_s(chain: Chain, courses: Sequence[Course], wire: LinkCosts, averages: Averages) -> tuple[float, float]:
    """On the links, and in memory before and after: of the largest part, since all stages average theirs at once."""
    part = 0.5 if averages.half else 1.0
    halved = dataclasses.replace(
        chain,
        blocks=tuple(dataclasses.replace(one, weight_bytes=round(part * one.weight_bytes)) for one in chain.blocks),
    )
    travels_s = max((each.seconds for each in sums_of(halved, courses, wire)), default=0.0)
    largest = max(
        chain.weight_bytes(first, end)
        for course in courses
        for first, end in zip(course.starts, course.ends(chain), strict=True)
    )
    arrives = gpu_work.arrive if averages.overlap else gpu_work.arrive_at_once
    casts_s = 2 * wire.costs.work_s(gpu_work.cast(largest)) if averages.half else 0.0
    return travels_s, casts_s + wire.costs.work_s(gpu_work.leave(largest)) + wire.costs.work_s(arrives(largest))
