"""One question about one job to one host, or to all of its hosts: end, how it stands, what else is remembered there.

agents(plan, hosts)                 {"a": {"state": "running", ...}, "b": HostError(...)}
cancel(plan, hosts)                 asks every host to end the job; each answers at once
recall(host, known_ids)             the jobs that this host remembers beside those
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from orchestrator.errors import HostError
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import for_each

ASK_S = 30.0
"""For an answer of `remote/control.py`."""
MAX_RECALLS = 20
"""Answers, of at most a megabyte each, that one host may give to one rescan."""
RECALL_S = MAX_RECALLS * ASK_S

R = TypeVar("R")


def ask_host(
    host: ConnectedHost, plan: LaunchPlan, action: str, *, timeout_s: float = ASK_S, **more: Any
) -> dict[str, Any]:
    """Its answer to this action of `remote/control.py` on the job. Raises HostError."""
    request = {"action": action, "workdir": plan.node(host.node).workdir, "job": plan.job, **more}
    return ask.ask(host, "control", request, timeout_s=timeout_s)


def on_all(
    plan: LaunchPlan, action: Callable[[str], R], deadline_s: float, only: Mapping[str, Any] | None = None
) -> dict[str, R | HostError]:
    """`action` of each of the job's nodes, all at once. only: those of them that this names; None means all."""
    names = {node.name: node.name for node in plan.nodes if only is None or node.name in only}
    return for_each(names, action, deadline_s=deadline_s + 5)


def whose(plan: LaunchPlan) -> dict[str, Any]:
    """How a request names the home and the cluster that the job belongs to."""
    return {"owner": plan.owner.model_dump() if plan.owner else None, "cluster": plan.cluster}


def cancel(
    plan: LaunchPlan, hosts: Mapping[str, ConnectedHost], *, fence: bool = False
) -> dict[str, dict[str, Any] | HostError]:
    """Asks every host to end the job; each answers whether a supervisor was there to hear it.

    fence: the start was left half done; a host where nothing of it has arrived yet will start nothing later either.
    """
    action = "fence" if fence else "cancel"
    return on_all(plan, lambda name: ask_host(hosts[name], plan, action, **whose(plan)), ASK_S, only=hosts)


def agents(plan: LaunchPlan, hosts: Mapping[str, ConnectedHost]) -> dict[str, dict[str, Any] | HostError]:
    """Every host's supervisor record of this job; {} where the host knows nothing of it."""

    def look(name: str) -> dict[str, Any]:
        answer = ask_host(hosts[name], plan, "status")
        return ask.understood(name, lambda: dict(answer.get("jobs", {}).get(plan.job, {})))

    return on_all(plan, look, ASK_S, only=hosts)


def recall(host: ConnectedHost, known: Sequence[str]) -> dict[str, Any]:
    """What this host remembers of jobs beside those: by id {"plan", "agent"}, not to be taken on trust."""
    found = dict[str, Any]()
    for _ in range(MAX_RECALLS):
        request = {"action": "recall", "workdir": host.workdir, "known": [*known, *found]}
        answer = ask.ask(host, "control", request, timeout_s=ASK_S)
        jobs = answer.get("jobs")
        if not isinstance(jobs, dict) or not jobs.keys() - found.keys():
            break
        found |= {str(name): job for name, job in jobs.items() if isinstance(job, dict)}
        if answer.get("more") is not True:
            break
    return found
