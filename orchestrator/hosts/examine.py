"""Asks a host all that it can say by itself, in one question: gives its facts and its health, or raises its error.

    found = examine(host, ["192.168.1.42"], data="~/data", timeout_s=90)
    found.facts.gpus, found.health.limits["nofile"].soft

What that means is judged in `orchestrator/doctor/`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.hosts.answers import read_facts, read_health
from orchestrator.hosts.facts import MAX_PEERS, NodeFacts
from orchestrator.hosts.health import Health
from orchestrator.hosts.probe import limit_of
from orchestrator.transport.ask import ConnectedHost, ask, understood


@dataclass(frozen=True)
class Examined:
    facts: NodeFacts
    health: Health
    began: tuple[int, int, str] | None
    """A process there that should outlive the connection: pid, start time, boot id."""


def examine(host: ConnectedHost, peers: Sequence[str], *, data: str, timeout_s: float) -> Examined:
    """peers: addresses or names to ask the host's route to. data: the folder of data sets there."""
    wanted = {"workdir": host.workdir, "peers": list(peers[:MAX_PEERS]), "torch": True, "data": data}
    sent_at = time.time()
    answer = ask(host, "examine", {**wanted, "limit_s": limit_of(timeout_s)}, timeout_s=timeout_s)
    facts = read_facts(host.node, answer, sent_at, time.time())
    return Examined(facts, read_health(host.node, answer), understood(host.node, lambda: _began(answer.get("began"))))


def outlived(host: ConnectedHost, began: tuple[int, int, str], *, timeout_s: float) -> bool | None:
    """Whether that process is still there; None where it was to end by now. Ends it."""
    alive = ask(host, "outlives", {"began": list(began)}, timeout_s=timeout_s).get("alive")
    return alive if alive is None else alive is True


def _began(value: Any) -> tuple[int, int, str] | None:
    if value is None:
        return None
    pid, start_time, boot = value
    if not isinstance(pid, int) or not isinstance(start_time, int) or not isinstance(boot, str) or len(boot) > 100:
        raise ValueError("no process")
    return pid, start_time, boot
