"""What an elastic job went on after, as its hosts report it. Pure.

    faults_of(plan, records, known)     (Fault(node="v100", reason="no word for 20 s: ...", after_s=61.2), ...)

records: the supervisors' (`agent.json`), by host; nothing in them is taken on trust.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from orchestrator.jobs.record import Fault, FirstFailure
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.text import one_line

KEPT = 200


def faults_of(
    plan: LaunchPlan, records: Mapping[str, Mapping[str, Any]], known: Sequence[Fault] = ()
) -> tuple[Fault, ...]:
    """In the order of time. known: what was reported before, maybe by a host that is away now.

    Ranks that only felt another's death are left out, unless nobody says more.
    """
    reported = [one for name, record in records.items() for one in _reported(plan, name, record)]
    causes = [fault for fault, secondary in reported if not secondary] or [*known] or [fault for fault, _ in reported]
    by_place = {(fault.node, fault.rank, fault.restart): fault for fault in (*known, *causes)}
    faults_now = [in_own_words(fault, records.get(fault.node, {})) for fault in by_place.values()]
    return tuple(sorted(faults_now, key=lambda fault: fault.after_s)[:KEPT])


def in_own_words(fault: Fault, record: Mapping[str, Any]) -> Fault:
    """A lost host's fault with the reason that the host itself, or its keeper, gives: the others only miss it."""
    if fault.rank is not None or not own_loss(fault.node, record):
        return fault
    with contextlib.suppress(ValidationError):
        own = FirstFailure.model_validate(record["first_failure"])
        said = {name: getattr(own, name) for name in ("reason", "log_line", "signal", "exit_code")}
        return fault.model_copy(update=said)
    return fault


def _reported(plan: LaunchPlan, name: str, record: Mapping[str, Any]) -> list[tuple[Fault, bool]]:
    """A host speaks of its own ranks, and the master of lost hosts, too."""
    reported = []
    faults = record.get("faults")
    for one in faults[-KEPT:] if isinstance(faults, list) else ():
        with contextlib.suppress(ValidationError):
            fault = Fault.model_validate(one)
            lost = name == plan.master and fault.rank is None and fault.node in {node.name for node in plan.nodes}
            if lost or (fault.node == name and fault.rank in plan.node(name).rank_numbers):
                reported.append((fault, bool(one.get("secondary"))))
    return reported


def own_loss(name: str, record: Mapping[str, Any]) -> bool:
    """Whether this host ended because it was lost itself, by its own or its keeper's word."""
    failure = record.get("first_failure")
    if record.get("state") != "failed" or not isinstance(failure, Mapping):
        return False
    return failure.get("node") == name and failure.get("kind") in ("lost", "supervisor")


def lost_nodes(faults: Sequence[Fault]) -> frozenset[str]:
    return frozenset(fault.node for fault in faults if fault.rank is None)


def fault_words(fault: Fault) -> str:
    """One line; the caller knows that the job went on."""
    when = f"after {fault.after_s:.0f} s"
    if fault.rank is None:
        return f"{one_line(fault.node)}: lost {when}: {one_line(fault.reason)}; the job continues without it"
    line = f" ({one_line(fault.log_line)})" if fault.log_line else ""
    return f"{one_line(fault.node)}: {one_line(fault.reason)} {when}{line}; the ranks are restarted"
