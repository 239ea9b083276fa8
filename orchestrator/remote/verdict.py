"""Decides the hub's next order from everybody's status: pure, so that every case can be tested without a process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .messages import Failure, FinalState, Order, Status, failure, finish


def decide(statuses: Mapping[str, Status], lost: Mapping[str, str], settled: bool) -> Order:
    """The order that follows. statuses: every member's latest, in node-rank order (a member not heard of yet has {}).
    lost: nodes that are gone, and why, in the order of their loss. settled: whether the time for stragglers to report
    after a stop is over.
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
    if all(phase not in (None, "joining") for phase in phases):
        return {"do": "start"}
    return {"do": "wait"}


def severed(statuses: Mapping[str, Status], lost: Iterable[str]) -> dict[str, str]:
    """The hosts that have to go because they and another one do not reach each other, though the hub hears both, and
    why: of each such pair the one that more ways are cut to, and never the master where the other will do. statuses: as
    for `decide`; in `cut` each says whom it does not reach, and how.
    """
    master, found = next(iter(statuses)), dict[str, str]()
    cut = {
        frozenset((node, other)): f"{node} and {other} cannot reach each other ({how}), though the master hears both"
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
    """The failure that came first, effects of others' deaths last."""
    if not failures:
        return None
    return min(failures, key=lambda one: (_weight(one), one.get("order", 0)))


def _weight(one: Failure) -> int:
    if one.get("secondary"):
        return 2
    # A lost host explains everybody's broken connections, but not a rank that failed by its own word.
    return 1 if one["kind"] == "lost" else 0
