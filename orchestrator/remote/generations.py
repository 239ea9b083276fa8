"""The hub's part in an elastic job: which hosts train together now, and when they restart. Pure.

    generations = Generations(max_restarts=3)
    generations.order(statuses)     {"do": "start", "generation": 0, "members": ["a", "b", "c"]}
    generations.order(statuses)     {"do": "regroup", "generation": 1, "hearsay": False}: one fell, or is gone

A generation is one torchrun on each host, all started together. When a rank dies or a host is lost, everybody ends what
is left of it and says `joined` for the next one; then that starts with the hosts that there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .messages import Order, ReportedFault, Status


class Generations:
    """max_restarts: how often a host's ranks may die and restart."""

    def __init__(self, max_restarts: int) -> None:
        self.number = 0
        self._max_restarts = max_restarts
        self._members: tuple[str, ...] = ()
        self._running = self._hearsay = False
        self._falls: Counter[str] = Counter()

    def order(self, statuses: Mapping[str, Status]) -> Order:
        """What follows while no host has failed for good. statuses: of the hosts that are left, the master first.

        {"do": "give up", "cause": a fault} where a host has fallen too often.
        """
        if self._running:
            faults, gone = self._faults(statuses), self._gone(statuses)
            if not faults and not gone:
                return {"do": "start", "generation": self.number, "members": list(self._members)}
            # As long as only echoes are heard, the one who broke the connection may be slow to end.
            self._hearsay = not gone and all(fault.get("secondary") for fault in faults.values())
            self._running, self.number = False, self.number + 1
        if not all(_is_ready(status, self.number) for status in statuses.values()):
            return {"do": "regroup", "generation": self.number, "hearsay": self._hearsay}
        if cause := self._worn_out(statuses):
            return {"do": "give up", "cause": cause}
        self._members, self._running = tuple(statuses), True
        return {"do": "start", "generation": self.number, "members": list(self._members)}

    def _faults(self, statuses: Mapping[str, Status]) -> dict[str, ReportedFault]:
        """The first fault of each host in the generation that was started last; one of its own before an echo."""
        last = self.number if self._running else self.number - 1
        found: dict[str, ReportedFault] = {}
        for node, status in statuses.items():
            own = [fault for fault in status.get("faults", ()) if fault["generation"] == last]
            if own:
                found[node] = min(own, key=lambda fault: bool(fault.get("secondary")))
        return found

    def _gone(self, statuses: Mapping[str, Status]) -> set[str]:
        return set(self._members) - statuses.keys()

    def _worn_out(self, statuses: Mapping[str, Status]) -> ReportedFault | None:
        """Counts who fell; the fault of one that did once too often. Echoes count where nothing else explains them."""
        faults = self._faults(statuses)
        true = {node: fault for node, fault in faults.items() if not fault.get("secondary")}
        if not true and not self._gone(statuses):
            true = faults
        self._falls.update(list(true))
        for node, fault in true.items():
            if self._falls[node] > self._max_restarts:
                times = f"{self._max_restarts} restart{'' if self._max_restarts == 1 else 's'}"
                return {**fault, "reason": f"{fault['reason']}, and that after {times}"}
        return None


def _is_ready(status: Status, generation: int) -> bool:
    return status.get("phase") == "joined" and status.get("generation", 0) == generation
