"""A supervisor's part in an elastic job: the generation that it has come to, and what went wrong in each.

elastic.add(failure)              # a rank died, and the job goes on
elastic.status()                  what the hub hears of it (`generations`)
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from .messages import Failure, RankRecord, ReportedFault, Status
from .processes import Identity, identify

KEPT = 20
"""How many of the newest faults are kept: the record has to fit into `layout.RESERVE_BYTES`."""
MOST_REPORTED = 8
"""So many of the newest faults travel with each report to the hub."""


class ElasticState:
    """ranks: the supervisor's record of each of its ranks."""

    def __init__(self, node: dict[str, Any], ranks: dict[str, RankRecord]) -> None:
        self.minimum: int = node["elastic"]["min_nodes"]
        self.generation = self.wanted = 0
        """The one that we are ready for or in, and the one that we are on the way to."""
        self.faults: list[ReportedFault] = []
        self._ranks = ranks
        self._scripts = dict[str, Identity]()
        self._began = time.monotonic()

    def begin(self) -> None:
        """From now on the seconds of faults are counted."""
        self._began = time.monotonic()

    def started(self, event: dict[str, Any]) -> None:
        """A rank runs, for the first time or again."""
        rank = str(event["rank"])
        self._ranks[rank]["world_size"] = event["world_size"]
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._scripts[rank] = identify(event["pid"])

    def add(self, failure: Failure) -> None:
        """Something went wrong, and the job goes on."""
        rank = failure["rank"]
        restart = None if rank is None else self._ranks.get(str(rank), RankRecord()).get("restarts", 0)
        after_s = round(time.monotonic() - self._began, 3)
        self.faults.append({**failure, "after_s": after_s, "restart": restart, "generation": self.generation})
        del self.faults[:-KEPT]

    def has_fallen(self) -> bool:
        """Whether a rank of ours died in this generation."""
        return any(fault["generation"] == self.generation and fault["rank"] is not None for fault in self.faults)

    def is_through(self) -> bool:
        return all(rank.get("exit_code") == 0 for rank in self._ranks.values())

    def status(self) -> Status:
        own = [fault for fault in self.faults if fault["rank"] is not None]  # of lost hosts the hub knows by itself
        return {"generation": self.generation, "faults": own[-MOST_REPORTED:]}

    def leave(self) -> list[Identity]:
        """What the ranks of this generation run; they belong to nobody now."""
        scripts = list(self._scripts.values())
        self._scripts.clear()
        return scripts

    def enter(self, generation: int) -> None:
        self.generation = generation
        for rank in self._ranks.values():
            rank.pop("exit_code", None)
