"""The accuracy at which a run was to end, and when it came to that, from the ranks' `target` event.

read_target(events)     AccuracyTarget(asked=0.99, reached=Reached(accuracy=0.9912, step=3751, ...))
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationError

from orchestrator.planning.recorded_settings import read_settings
from orchestrator.record import Record
from orchestrator.results.events import Events
from orchestrator.units import format_duration, format_percent

Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=1 << 60)]


class Reached(Record):
    """The evaluation that reached it."""

    accuracy: Ratio
    step: Count
    """After this update, counted from 0 over the whole run."""
    epoch: Count
    samples: Count
    """Of the whole run, up to then."""
    total_s: Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
    """Since the start of the process, which may have gone on from a checkpoint."""


class AccuracyTarget(Record):
    asked: Ratio
    reached: Reached | None = None

    @property
    def words(self) -> str:
        asked = format_percent(self.asked, 2)
        if not self.reached:
            return f"{asked} not reached"
        found = self.reached
        return (
            f"{asked} reached ({format_percent(found.accuracy, 2)}) after {format_duration(found.total_s)}, "
            f"{found.step + 1:,} updates, {found.samples:,} samples, in epoch {found.epoch + 1}"
        )


def read_target(events: Events) -> AccuracyTarget | None:
    """Every rank reports the same: the first that does counts. None where no target was set."""
    start = next(iter(events.latest("start").values()), {})
    asked = read_settings(start.get("settings")).target_accuracy
    if not asked or not 0 < asked <= 1:
        return None
    for event in events.latest("target").values():
        try:
            return AccuracyTarget(asked=asked, reached=Reached.model_validate(event))
        except ValidationError:
            continue
    return AccuracyTarget(asked=asked)
