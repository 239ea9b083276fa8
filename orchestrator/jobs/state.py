"""A job's state, combined from its hosts' supervisor records (`agent.json`), which are untrusted. Pure."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from pydantic import ValidationError

from orchestrator.errors import HostError
from orchestrator.jobs.job_store import ENDED, FirstFailure, JobRecord, JobState, NotFinite
from orchestrator.jobs.queue_place import place_in
from orchestrator.jobs.stall import joined, stall_of
from orchestrator.planning.launch_plan import Attempt, CodeFolder, Earlier, LaunchPlan
from orchestrator.slurm.answers import SlurmJob
from orchestrator.slurm.batch_script import STOP_S
from orchestrator.units import one_line

PREPARE_S = 120.0
LATE_S = 30.0
"""Slurm looks at time limits twice a minute."""
# A job that no host reports may still be on its way for this long.
START_S = 2 * PREPARE_S + 30
_NO_RECORD = "no supervisor and no final record on any host"


def combine(
    plan: LaunchPlan,
    found: Mapping[str, Mapping[str, Any] | HostError],
    known: JobRecord,
    now: datetime,
    *,
    launched: bool = False,
) -> JobRecord:
    """known: the previous record.

    The master's final record decides; without it, another host's. A record whose supervisor is gone means lost. An
    unreachable host changes nothing. A known end stays, despite an older answer or a host without files.
    launched: `go` was sent to every host before they were asked, so the job cannot still be on its way.
    """
    records = {name: dict(record) for name, record in found.items() if isinstance(record, Mapping)}
    if (met := joined(plan, records)) is not None:
        known = known.model_copy(update={"joined": met})
    if first := first_not_finite(plan, records, known.not_finite):
        known = known.model_copy(update={"not_finite": first})
    if known.state in ENDED:
        return _with_own_cause(known, records)
    known = _as_seen(plan, records, known)
    if plan.asked.waits and known.state in ("queued", "starting") and known.attempt == plan.attempt:
        known = known.model_copy(update=_started(records))
    final = _final(plan, records)
    alive = [record for record in records.values() if record.get("alive")]
    if final:
        known = known.model_copy(update={"waits_for": None, **_attempts(final, known)})
    if records.get(plan.master) in final:
        return _with_own_cause(_ended(known, records[plan.master], plan.code), records)
    if final and not alive:
        word = min(final, key=lambda record: record["state"] == "succeeded")
        return _with_own_cause(_ended(known, word, plan.code), records)
    if alive:
        return known.model_copy(update=_of_living(plan, alive, known))
    return _without_a_supervisor(plan, records, known, may_come=not launched and _is_young(known, now))


def _started(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A job that could queue began with its ranks."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError):
        times = [rank["started"] for record in records.values() for rank in record.get("ranks", {}).values()]
        return {"started": datetime.fromtimestamp(min(times), timezone.utc).isoformat(timespec="seconds")}
    return {}


def _of_living(plan: LaunchPlan, alive: Sequence[Mapping[str, Any]], known: JobRecord) -> dict[str, Any]:
    phases = {str(record.get("phase")) for record in alive}
    update: dict[str, Any] = {"state": "starting", "waits_for": None, **_attempts(alive, known)}
    if any(record.get("state") != "starting" for record in alive):
        update["state"] = "running"
    elif "queued" in phases:
        by_node = {str(record.get("node")): record for record in alive if record.get("node") in known.nodes}
        update |= {"state": "queued", "waits_for": place_in(by_node) or None}
    elif update.get("attempt") and "resting" in phases:
        attempt: Attempt = update["attempt"]
        update["waits_for"] = f"attempt {attempt.words} follows, after {attempt.earlier[-1].why}"
    return update


def _attempts(records: Sequence[Mapping[str, Any]], known: JobRecord) -> dict[str, Any]:
    """The attempts of a job that its supervisors retry themselves."""
    found: list[Earlier] = []
    for record in records:
        with contextlib.suppress(KeyError, TypeError):
            whys = [Earlier(job=known.id, why=one_line(one["why"], 300)) for one in record["earlier"]]
            found = max(found, whys, key=len)
    if not found or known.attempt is None:
        return {}
    return {"attempt": known.attempt.model_copy(update={"number": len(found) + 1, "earlier": tuple(found)})}


def _as_seen(plan: LaunchPlan, records: Mapping[str, Mapping[str, Any]], known: JobRecord) -> JobRecord:
    if len(records) == len(plan.nodes):  # else the last known stall stays
        known = known.model_copy(update={"stall": stall_of(plan, records, known.stall)})
    return known


def first_not_finite(
    plan: LaunchPlan, records: Mapping[str, Mapping[str, Any]], known: NotFinite | None
) -> NotFinite | None:
    found = [known] if known else []
    for node in plan.nodes:
        record: Mapping[str, Any] = records.get(node.name, {})
        ranks = record.get("ranks")
        for rank in node.rank_numbers:
            reported = ranks.get(str(rank)) if isinstance(ranks, Mapping) else None
            mark = reported.get("not_finite") if isinstance(reported, Mapping) else None
            if isinstance(mark, Mapping):
                with contextlib.suppress(ValidationError):
                    found.append(NotFinite.model_validate({**mark, "node": node.name, "rank": rank}))
    return min(found, key=lambda one: (one.step, one.of != "loss", one.rank), default=None)


def _final(plan: LaunchPlan, records: Mapping[str, Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [one for one in records.values() if one.get("state") in [*ENDED]]  # a set would hash untrusted values


def _without_a_supervisor(
    plan: LaunchPlan, records: Mapping[str, Mapping[str, Any]], known: JobRecord, *, may_come: bool
) -> JobRecord:
    """No host runs it or reports its end. may_come: it may still be on its way."""
    undone = [record.get("state") == "undone" for record in records.values()]
    if any(undone) and len(records) == len(plan.nodes) and not any("go" in record for record in records.values()):
        return known.model_copy(update={"state": "cancelled"})  # one host undone, none asked to start: nothing ran
    unreported = all(record.get("state") in (None, "lost") for record in records.values())
    if len(records) == len(plan.nodes) and not (unreported and may_come):
        reason = "its files are gone from every host" if not any(records.values()) else _NO_RECORD
        gone = FirstFailure(node=plan.master, reason=reason)
        return known.model_copy(update={"state": "lost", "first_failure": gone, "exit_code": 1})
    return known


def is_half_started(found: Mapping[str, Mapping[str, Any] | HostError]) -> bool:
    """Whether a host that answered never received `go` and did not undo its start."""
    records = [record for record in found.values() if isinstance(record, Mapping)]
    return any("go" not in record and record.get("state") != "undone" for record in records)


def is_gone(plan: LaunchPlan, records: Mapping[str, Mapping[str, Any] | HostError]) -> bool:
    """Whether every host reports that it holds nothing of the job."""
    gone = [isinstance(record, Mapping) and record.get("gone") is True for record in records.values()]
    return len(gone) == len(plan.nodes) and all(gone)


def _is_young(known: JobRecord, now: datetime) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        age_s = (now - datetime.fromisoformat(known.started or "")).total_seconds()
        return known.state == "starting" and age_s < START_S
    return False


def _ended(known: JobRecord, record: Mapping[str, Any], code: CodeFolder) -> JobRecord:
    """record: untrusted."""
    failure = _first_failure(record)
    from orchestrator.planning.bundle import unsent_words  # brings tarfile, which no list of jobs needs

    if failure and failure.log_line and (unsent := unsent_words(code, failure.log_line)):
        how_it_ended = failure.reason.partition(": ")[0]  # not the host's advice: the list of unsent files is here
        failure = failure.model_copy(update={"reason": f"{how_it_ended}: {unsent}"})
    state: JobState = record["state"]
    ended = known.ended
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        ended = datetime.fromtimestamp(record["ended"], timezone.utc).isoformat(timespec="seconds")
    return known.model_copy(
        update={"state": state, "first_failure": failure, "exit_code": _exit_code(state, failure), "ended": ended}
    )


def is_weak(record: JobRecord) -> bool:
    """Whether no host reports a cause of its end: a supervisor that Slurm has ended reports only that."""
    failure = record.first_failure
    return record.state == "lost" or (record.state == "failed" and failure is not None and failure.kind == "supervisor")


def ended_by(record: JobRecord, slurm: SlurmJob) -> JobRecord:
    """Completes a record without a cause by what Slurm did to the job; any cause that a host reports is better."""
    failure = record.first_failure
    phase = slurm.phase
    if (
        failure
        and failure.kind == "supervisor"
        and phase in ("runs", "failed", "done")
        and slurm.left_s < STOP_S + LATE_S
    ):
        phase = "time"  # Slurm has asked for the end before the limit
    if not is_weak(record) or phase in ("runs", "ending", "done", "unknown"):
        return record
    if phase == "cancelled":
        return record.model_copy(update={"state": "cancelled", "first_failure": None, "exit_code": None})
    kind, reason = {
        "time": ("time", "Slurm's time limit is over"),
        "memory": ("memory", f"Slurm ended it: {slurm.state}"),
        "failed": (
            "slurm",
            failure.reason if failure and failure.kind == "slurm" else f"its batch step failed ({slurm.state})",
        ),
    }.get(phase, ("slurm", f"Slurm took its hosts away ({slurm.state})"))
    node = failure.node if failure else "Slurm"
    code = slurm.exit_code if phase == "failed" and slurm.exit_code else 1
    ended = FirstFailure(kind=kind, node=node, reason=reason)
    return record.model_copy(update={"state": "failed", "first_failure": ended, "exit_code": code})


def _with_own_cause(known: JobRecord, records: Mapping[str, Mapping[str, Any]]) -> JobRecord:
    """Replaces "lost" or "network", as other hosts see it, by that host's own first failure."""
    lost = known.first_failure
    if lost is None or lost.kind not in ("lost", "network"):
        return known
    record = records.get(lost.node, {})
    own = _first_failure(record) if record.get("state") == "failed" else None
    if own is None or own.node != lost.node:
        return known
    return known.model_copy(update={"first_failure": own, "exit_code": _exit_code(known.state, own)})


def _first_failure(record: Mapping[str, Any]) -> FirstFailure | None:
    with contextlib.suppress(ValidationError):
        return FirstFailure.model_validate(record.get("first_failure"))
    return None


def _exit_code(state: str, failure: FirstFailure | None) -> int | None:
    """128 + n for signal n, like a shell."""
    if state == "succeeded":
        return 0
    if state == "cancelled":
        return None
    if failure and failure.signal and (number := _signal_number(failure.signal)):
        return 128 + number
    return (failure.exit_code if failure else None) or 1


def _signal_number(name: str) -> int:
    """The number of `SIGKILL` or `SIG40`; 0 if unknown."""
    if name in signal.Signals.__members__:
        return signal.Signals[name].value
    number = name.removeprefix("SIG")
    return int(number) if number.isdecimal() and len(number) < 3 else 0
