"""How a run's batch was split over its ranks in the course of it, from the ranks' `rebalance` events.

read_rebalances(events, plan)       (Rebalance(step=7, shares=(45, 19), before=(32, 32), spread=0.83), ...)
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationError

from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.record import Record
from orchestrator.results.events import Events

MOST = 200
"""The most rebalances of one run that are read and shown."""

Share = Annotated[int, Field(ge=0, lt=1 << 40)]


class Rebalance(Record):
    """From `step` (counted from 0 over the whole run) on, each rank took so many samples of a full batch."""

    step: Annotated[int, Field(ge=0, lt=1 << 60)]
    shares: tuple[Share, ...]
    before: tuple[Share, ...]
    spread: Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
    """The spread of the ranks' compute times before: (max - min) / mean."""


def read_rebalances(events: Events, plan: LaunchPlan) -> tuple[Rebalance, ...]:
    """All ranks report the same: the first one that reports any counts. Impossible records are left out."""
    for node in plan.nodes:
        for rank in node.rank_numbers:
            read = [_read(event, plan.world_size) for event in events.of_rank(rank, "rebalance", MOST)]
            if rebalances := tuple(one for one in read if one):
                return rebalances
    return ()


def _read(event: dict[str, object], world_size: int) -> Rebalance | None:
    try:
        found = Rebalance.model_validate(event)
    except ValidationError:
        return None
    return found if len(found.shares) == len(found.before) == world_size and any(found.shares) else None
