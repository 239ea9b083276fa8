"""A supervisor's part in an elastic job: what it counts as a fault, and which ranks it ends so that they start anew.

torchrun starts this host's ranks anew when one of them dies, and meets the other hosts again. It does not see that a
host is gone: the survivors' ranks wait for it in a collective, maybe for ever. So those that met a lost host are ended
here, one and all, and torchrun does the rest.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from typing import Any

from .processes import Identity, identify

KEPT = 20
"""Of all faults, the newest so many: the record has to fit into `layout.RESERVE_BYTES`."""


class Elastic:
    """node: what this host was asked to do. ranks: the supervisor's record of each of its ranks."""

    def __init__(self, node: dict[str, Any], ranks: dict[str, dict[str, Any]]) -> None:
        self.minimum: int = node["elastic"]["min_nodes"]
        self.faults: list[dict[str, Any]] = []
        self._ranks_of: dict[str, int] = node["elastic"]["ranks"]
        self._ranks, self._lost = ranks, frozenset[str]()
        self._scripts = dict[str, Identity]()
        self._asked = set[str]()
        self._began = time.monotonic()

    def begin(self) -> None:
        """From now on the seconds of faults are counted."""
        self._began = time.monotonic()

    def started(self, event: dict[str, Any]) -> None:
        """A rank runs, for the first time or again."""
        rank = str(event["rank"])
        self._ranks[rank]["world_size"] = event["world_size"]
        self._asked.discard(rank)
        for fault in self.faults:
            fault["over"] = fault["over"] or fault["rank"] == event["rank"]
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._scripts[rank] = identify(event["pid"])
            self._end_who_met_the_lost()

    def add(self, found: dict[str, Any]) -> None:
        """found: as a failure would be told. Something went wrong, and the job goes on."""
        rank = self._ranks.get(str(found["rank"]), {})
        restart = None if found["rank"] is None else rank.get("restarts", 0)
        after_s = round(time.monotonic() - self._began, 3)
        self.faults.append({**found, "after_s": after_s, "restart": restart, "over": found["rank"] is None})
        del self.faults[:-KEPT]

    def present(self) -> list[dict[str, Any]]:
        """The faults of ranks that have not been started again, the newest last."""
        return [fault for fault in self.faults if not fault["over"]]

    def cause(self) -> dict[str, Any] | None:
        """Why torchrun gave up: the newest fault of a rank that it has not started again."""
        if not self.present():
            return None
        newest = self.present()[-1]
        times = newest["restart"]
        return {**newest, "reason": f"{newest['reason']}, and that after {times} restart{'' if times == 1 else 's'}"}

    def go_on_without(self, lost: Sequence[str]) -> None:
        self._lost = frozenset(lost)
        self._end_who_met_the_lost()

    def was_asked(self, rank: int) -> bool:
        """Whether it was we who ended it."""
        return str(rank) in self._asked

    def _end_who_met_the_lost(self) -> None:
        """A lost host never comes back (`hub`), so a world larger than what is left has one in it."""
        left = sum(count for node, count in self._ranks_of.items() if node not in self._lost)
        for rank, script in self._scripts.items():
            if self._ranks[rank]["world_size"] > left and rank not in self._asked:
                self._asked.add(rank)
                script.signal(signal.SIGKILL)  # in a collective it hears nothing else
