"""Decides the hub's next order from all statuses, without side effects, so that every case can be tested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .messages import BEFORE_JOINING, Failure, FinalState, Order, Status, failure, finish


def decide(statuses: Mapping[str, Status], lost: Mapping[str, str], settled: bool) -> Order:
    """statuses: every member's latest, in node-rank order ({} before its first). lost: lost nodes and why, in order of
    loss. settled: the time for late reports after a stop is over.
    """
    failures = [f for status in statuses.values() for f in status.get("failures", ())]
    failures += [failure("lost", node, why) for node, why in lost.items()]
    cancelled = any(status.get("cancelled") for status in statuses.values())
    phases = [status.get("phase") for node, status in statuses.items() if node not in lost]
    if failures or cancelled:
        first = first_cause(failures)
        if cancelled and (first is None or first.get("secondary")):
            first = None
        state: FinalState = "failed" if first else "cancelled"
        if settled or all(phase == "ended" for phase in phases):
            return finish(state, first)
        return {"do": "stop", "state": state, "first_failure": first}
    if all(phase in ("done", "ended") for phase in phases):
        return finish("succeeded", None)
    if all(phase not in BEFORE_JOINING for phase in phases):
        return {"do": "start"}
    return {"do": "wait"}


def severed(statuses: Mapping[str, Status], lost: Iterable[str]) -> dict[str, str]:
    """Hosts that have to leave, and why, because they and another host cannot reach each other although both reach the
    hub: of each pair the host with more failed connections, and the master only if there is no alternative.
    """
    master, found = next(iter(statuses)), dict[str, str]()
    cut = {
        frozenset((node, other)): f"{node} and {other} cannot reach each other ({how}), though both reach the master"
        for node, status in statuses.items()
        for other, how in status.get("cut", {}).items()
        if other in statuses and not {node, other} & set(lost)
    }
    while cut:
        ends = [node for node in statuses for pair in cut if node in pair]
        worst = max(ends, key=lambda node: (ends.count(node), node != master, ends.index(node)))
        found[worst] = next(why for pair, why in cut.items() if worst in pair)
        cut = {pair: why for pair, why in cut.items() if worst not in pair}
    return found


def first_cause(failures: list[Failure]) -> Failure | None:
    """The earliest failure; lost hosts, then effects of other failures, count only without another cause."""
    if not failures:
        return None
    return min(failures, key=lambda cause: (_weight(cause), cause.get("order", 0)))


def _weight(cause: Failure) -> int:
    if cause.get("secondary"):
        return 2
    # A lost host explains broken connections everywhere, but not a rank that failed by itself.
    return 1 if cause["kind"] == "lost" else 0
