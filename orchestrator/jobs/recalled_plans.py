"""Plans of jobs that come from their hosts. Pure.

They are checked before use, and serve logs, cancel and collect; nothing is launched from them. Python and folders come
from the inventory, numbers are bounded, and texts lose their control characters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from orchestrator.hosts.cluster import Cluster
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.record import SCHEMA, Owner
from orchestrator.units import clean

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_RANKS = 1 << 16
MAX_GRACE_S = 3600.0


class OtherCluster(ValueError):
    """Another cluster uses the same hosts; this is no error."""


@dataclass(frozen=True)
class Recalled:
    plans: dict[str, LaunchPlan]
    left_out: list[str]
    elsewhere: dict[str, list[str]]
    """By cluster."""


def recall(answers: Mapping[str, Mapping[str, Any]], cluster: Cluster) -> Recalled:
    """answers: by node, from `recall` of `remote/control.py`."""
    plans, left_out, elsewhere = dict[str, LaunchPlan](), list[str](), dict[str, list[str]]()
    for node, jobs in answers.items():
        for job, remembered in jobs.items():
            if job in plans:
                continue
            try:
                plan = adopt(remembered["plan"], cluster, node=node, job=job)
                plans[job] = plan.model_copy(update={"owner": _owner(remembered.get("agent"))})
            except OtherCluster as other:
                jobs_there = elsewhere.setdefault(str(other), [])
                jobs_there += [] if job in jobs_there else [clean(str(job))[:128]]
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
                left_out.append(f"{node}: job {clean(str(job))[:128]} is skipped: {_why(error)}")
    return Recalled(plans, left_out, elsewhere)


def adopt(record: Any, cluster: Cluster, *, node: str, job: str) -> LaunchPlan:
    """Raises ValueError if the plan contradicts the inventory or itself."""
    if record["schema"] > SCHEMA:
        raise ValueError(f"written by a newer orch, schema {record['schema']}: update this one")
    plan = LaunchPlan.model_validate(_cleaned(record))
    if not JOB_ID.fullmatch(job) or plan.job != job:
        raise ValueError("it names another job")
    if plan.cluster != cluster.name:
        raise OtherCluster(plan.cluster[:64])
    names = [planned.name for planned in plan.nodes]
    unknown = set(names) - {node.name for node in cluster.nodes}
    if unknown:
        raise ValueError(f"cluster {cluster.name} has no node {', '.join(sorted(unknown))[:200]}")
    if len(set(names)) < len(names) or node not in names or plan.master not in names:
        raise ValueError("its nodes contradict each other")
    _check_numbers(plan)
    nodes = []
    for planned in plan.nodes:
        here = cluster.node(planned.name)
        where = {"python": here.python, "activate": here.activate, "workdir": here.workdir, "kind": here.kind}
        nodes.append(planned.model_copy(update=where))
    return plan.model_copy(update={"nodes": tuple(nodes)})


def agents_of(job: str, plan: LaunchPlan, answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """By node that answered: its supervisor's record, or {}."""
    found = {}
    for node in plan.nodes:
        if node.name in answers:
            remembered = answers[node.name].get(job)
            agent = remembered.get("agent") if isinstance(remembered, Mapping) else None
            found[node.name] = agent if isinstance(agent, Mapping) else {}
    return found


def _owner(agent: Any) -> Owner | None:
    """From node.json, which changes when a job is taken over; the plan does not change."""
    owner = agent.get("owner") if isinstance(agent, Mapping) else None
    return Owner.model_validate(_cleaned(owner)) if owner else None


def _check_numbers(plan: LaunchPlan) -> None:
    first = 0
    for node in plan.nodes:
        if not 0 < node.ranks <= MAX_RANKS or node.first_rank != first:
            raise ValueError("its ranks contradict each other")
        first += node.ranks
    if first != plan.world_size:
        raise ValueError("its ranks contradict each other")
    if not math.isfinite(plan.grace_s) or not 0 <= plan.grace_s <= MAX_GRACE_S:
        raise ValueError(f"a grace of {plan.grace_s} s")
    if datetime.fromisoformat(plan.created).tzinfo is None:
        raise ValueError("a time of creation without a time zone")


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(str(key)): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return value


def _why(error: Exception) -> str:
    lines: Iterable[str] = str(error).splitlines() or [type(error).__name__]
    return clean(next(iter(lines)))[:200]
