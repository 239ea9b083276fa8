"""Asks a host what it is: gives its `NodeFacts`, or raises its error.

    probe(host, ["192.168.1.42"], torch=True, timeout_s=90).gpus
    facts, health = look(host, ["192.168.1.42"], torch=True, timeout_s=90)

One round trip (`remote/probe.py`), parsed by `facts`. What a host's facts mean is judged in `checks`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.health import Health
from orchestrator.hosts.network_answers import MAX_PEERS
from orchestrator.hosts.parse_facts import parse_facts
from orchestrator.hosts.parse_health import parse_health
from orchestrator.transport.ask import ConnectedHost, ask

# Kept back from the time for the way there and back, so that a slow fact costs itself and not the whole answer.
SPARE_S = 5.0


def probe(host: ConnectedHost, peers: Sequence[str], *, torch: bool, timeout_s: float) -> NodeFacts:
    """peers: addresses or names to ask the host's route to. torch: whether to import torch there (seconds)."""
    return _asked(host, peers, torch, timeout_s)[0]


def look(host: ConnectedHost, peers: Sequence[str], *, torch: bool, timeout_s: float) -> tuple[NodeFacts, Health]:
    """The same, and what may end a job there later."""
    facts, answer = _asked(host, peers, torch, timeout_s)
    return facts, parse_health(host.node, answer)


def _asked(
    host: ConnectedHost, peers: Sequence[str], torch: bool, timeout_s: float
) -> tuple[NodeFacts, Mapping[str, Any]]:
    limit_s = max(timeout_s - SPARE_S, timeout_s / 2)
    request = {"workdir": host.workdir, "peers": list(peers[:MAX_PEERS]), "torch": torch, "limit_s": limit_s}
    sent_at = time.time()
    answer = ask(host, "probe", request, timeout_s=timeout_s)
    return parse_facts(host.node, answer, sent_at, time.time(), peers[:MAX_PEERS]), answer
