"""A step that the hooks have seen, and what the callback of a framework told of it. Pure.

    seen = SeenStep(120, 1763900000.2, taken)
    seen.hears({"epoch": 3, "samples": 32, "loss": 0.41}, mark)
    seen.told_fields(samples=16)            {"epoch": 3, "samples": 32, "loss": 13.12}

Facts are those that `trainer.integrations` gives: `epoch`, `samples` (this rank's), and `loss`, the mean over them.
What a callback does not know is absent. A loss may be a number that the device still has to copy: only here it is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .step_course import Mark, TakenStep


@dataclass
class SeenStep:
    number: int
    """Over the whole run."""
    wall_s: float
    """The time of day of its end."""
    taken: TakenStep
    told: dict[str, Any] = field(default_factory=dict)
    told_at: Mark | None = None

    @property
    def last_mark(self) -> Mark | None:
        """When the device has passed it, everything of this step can be read."""
        return self.told_at or (self.taken.stretches[-1][2] if self.taken.stretches else None)

    def hears(self, facts: Mapping[str, Any], now: Mark) -> None:
        """May come in several parts; of one fact the last counts."""
        self.told.update(facts)
        self.told_at = now

    def told_fields(self, samples: int) -> dict[str, Any]:
        """As a `step` record names them. samples: as many as the hooks have counted, for who does not tell it."""
        samples = self.told.get("samples", samples)
        fields: dict[str, Any] = {"epoch": self.told["epoch"]} if "epoch" in self.told else {}
        fields["samples"] = samples
        if "loss" in self.told:
            loss = float(self.told["loss"]) * samples
            fields["loss"] = loss if math.isfinite(loss) else None
        return fields
