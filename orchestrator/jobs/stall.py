"""What the hosts see of ranks that stand still or never met, put together over a whole job. Pure.

    stall_of(plan, records)         # Stall(quiet_s=180, ranks=(...)); None while some rank prints
    joined(plan, records)           # False: none of several ranks ever met another
    News(plan).of(record)           what to say to a person who follows the job

records: the supervisors' (`agent.json`), by host; nothing in them is taken on trust.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.jobs.record import JobRecord, Stall, StillRank
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.units import format_duration

DOES = {
    "waits": "waiting, with no CPU use",
    "disk": "waiting in the kernel, for a disk perhaps",
    "stopped": "stopped by a signal",
    "busy": "using the CPU",
    "ended": "ended",
}
"""In the order in which messages list them."""
NAMED = 4
MOST_S = 1e9


def stall_of(plan: LaunchPlan, records: Mapping[str, Any]) -> Stall | None:
    """None unless every host says that its ranks are quiet, and some rank waits."""
    found, quiet_s = list[StillRank](), math.inf
    for node in plan.nodes:
        record = records.get(node.name)
        record = record if isinstance(record, Mapping) else {}
        does = [_does(record, rank) for rank in node.rank_numbers]
        if None in does:
            return None
        found += [StillRank(node=node.name, rank=n, does=d) for n, d in zip(node.rank_numbers, does, strict=True) if d]
        if set(does) != {"ended"}:
            quiet_s = min(quiet_s, _seconds(record.get("quiet_s")))
    still = {rank.does for rank in found} & {"waits", "disk", "stopped"}
    return Stall(quiet_s=quiet_s, ranks=tuple(found)) if still else None


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= MOST_S else 0.0


def _does(record: Mapping[str, Any], rank: int) -> Any:
    """None where the rank prints, or nothing is known of it."""
    ranks = record.get("ranks")
    reported = ranks.get(str(rank)) if isinstance(ranks, Mapping) else None
    if not isinstance(reported, Mapping):
        return None
    if reported.get("does") in ("waits", "disk", "stopped", "busy"):
        return reported["does"]
    return "ended" if "exit_code" in reported or "signal" in reported else None


def joined(plan: LaunchPlan, records: Mapping[str, Any]) -> bool | None:
    """Whether any rank has met another; None where not every host has said so, or a rank has nobody to meet."""
    met = list[Any]()
    for node in plan.nodes:
        record = records.get(node.name)
        ranks = record.get("ranks") if isinstance(record, Mapping) else None
        for rank in node.rank_numbers:
            one = ranks.get(str(rank)) if isinstance(ranks, Mapping) else None
            met.append(one.get("met") if isinstance(one, Mapping) else None)
    if True in met:
        return True
    return False if plan.world_size > 1 and all(one is False for one in met) else None


def stall_words(stall: Stall) -> str:
    """`no output for 3m00s: waiting, with no CPU use: alpha (rank 0); using the CPU: beta (rank 1)`."""
    return f"no output for {format_duration(stall.quiet_s)}: {'; '.join(_groups(stall))}"


def who_words(job: str) -> str:
    """What a person may do about it."""
    return f"`orch why {job}` names who holds it up"


def _groups(stall: Stall) -> Iterator[str]:
    for does, words in DOES.items():
        hosts: dict[str, list[str]] = {}
        for rank in stall.ranks:
            if rank.does == does:
                hosts.setdefault(rank.node, []).append(str(rank.rank))
        if hosts:
            named = [f"{node} (rank{'s' * (len(of) > 1)} {', '.join(of)})" for node, of in list(hosts.items())[:NAMED]]
            more = f" and {len(hosts) - NAMED} more hosts" if len(hosts) > NAMED else ""
            yield f"{words}: {', '.join(named)}{more}"


class News:
    """What a person who follows a job has not been shown yet."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._shown: tuple[StillRank, ...] = ()
        self._is_alone_shown = False

    def of(self, record: JobRecord) -> Iterator[str]:
        ranks = record.stall.ranks if record.stall and record.state == "running" else ()
        if record.stall and ranks and ranks != self._shown:
            yield f"{stall_words(record.stall)}; the job keeps running, {who_words(record.id)}"
        self._shown = ranks
        if not self._is_alone_shown and (words := alone_words(self._plan, record)):
            self._is_alone_shown = True
            yield words


def alone_words(plan: LaunchPlan, record: JobRecord) -> str:
    """ "" where some rank has met another, or nobody can know; our own trainer always joins."""
    if record.joined is not False or plan.kind == "experiment" or record.state not in ("running", "succeeded"):
        return ""
    return (
        f"the {plan.world_size} ranks joined no process group, each runs by itself: a script joins with "
        "torch.distributed.init_process_group"
    )


def last_words(plan: LaunchPlan, record: JobRecord) -> Iterator[str]:
    """For a report: how the ranks were found last, and whether they met."""
    if record.stall:
        yield f"How its ranks were seen last: {stall_words(record.stall)}."
    if words := alone_words(plan, record):
        yield f"{words[0].upper()}{words[1:]}."
