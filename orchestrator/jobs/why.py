"""Asks every host of a job, at once, what its ranks are at.

looks(plan, hosts)          {"a": HostLook(...), "b": ConnectError(...)}: a host that is silent is an answer, too
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.errors import HostError
from orchestrator.jobs.control import on_all
from orchestrator.jobs.looks import HostLook
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost

ASK_S = 40.0
"""A host looks for about two seconds, and longer where many processes take their time to answer."""


def looks(plan: LaunchPlan, hosts: Mapping[str, ConnectedHost]) -> dict[str, HostLook | HostError]:
    def look(name: str) -> HostLook:
        node = plan.node(name)
        request = {"workdir": node.workdir, "job": plan.job}
        answer = ask.ask(hosts[name], "why", request, timeout_s=ASK_S)
        found = ask.understood(name, lambda: HostLook.model_validate(answer))
        own = tuple(rank for rank in found.ranks if rank.rank in node.rank_numbers)
        return found.model_copy(update={"ranks": own})

    return on_all(plan, look, ASK_S, only=hosts)
