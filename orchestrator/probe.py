"""Asks every host at once what it is: takes hosts by node name, gives each one's `NodeFacts` or its error.

    facts = probe_all(hosts, {"a2000": ("192.168.1.42",)}, torch=True, deadline_s=30)

One round trip a host (`remote/probe.py`), parsed by `facts`. What a host's facts mean is judged in `checks`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from orchestrator.call import Host, ask
from orchestrator.errors import HostError
from orchestrator.facts import NodeFacts, parse_facts
from orchestrator.transport.fanout import for_each

# Kept back from the deadline for the way there and back, so that a slow fact costs itself and not the whole answer.
SPARE_S = 5.0


def probe_all(
    hosts: Mapping[str, Host], peers: Mapping[str, tuple[str, ...]], *, torch: bool, deadline_s: float
) -> dict[str, NodeFacts | HostError]:
    """An answer for every host within `deadline_s`.

    peers: node -> addresses or names to ask that host's route to. torch: whether to import torch there (seconds).
    """
    limit_s = max(deadline_s - SPARE_S, deadline_s / 2)

    def probe(host: Host) -> NodeFacts:
        request = {
            "workdir": host.workdir,
            "peers": list(peers.get(host.node, ())),
            "torch": torch,
            "limit_s": limit_s,
        }
        sent_at = time.time()
        answer = ask(host, "probe", request, timeout_s=deadline_s)
        return parse_facts(host.node, answer, sent_at, time.time())

    return for_each(hosts, probe, deadline_s=deadline_s)
