"""Asks a host what it is: gives its `NodeFacts`, or raises its error.

    probe(host, ["192.168.1.42"], torch=True, timeout_s=90).gpus
    facts, health = look(host, ["192.168.1.42"], torch=True, timeout_s=90)

One round trip (`remote/probe.py`), parsed by `facts`. What a host's facts mean is judged in `checks`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.hosts.connections import Connections
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.health import Health
from orchestrator.hosts.inventory import Node
from orchestrator.hosts.network_answers import MAX_PEERS
from orchestrator.hosts.parse_facts import parse_facts
from orchestrator.hosts.parse_health import parse_health
from orchestrator.transport.ask import ConnectedHost, ask
from orchestrator.transport.fanout import for_each, values

# Kept back from the time for the way there and back, so that a slow fact costs itself and not the whole answer.
SPARE_S = 5.0
TORCH_S = 60.0
SLOW_TORCH_S = 240.0
"""For a second try: torch on a network disk, with a cold cache, takes minutes to load."""
SAME_FOLDER_S = 15.0


def probe(host: ConnectedHost, peers: Sequence[str], *, torch: bool, timeout_s: float) -> NodeFacts:
    """peers: addresses or names to ask the host's route to. torch: whether to import torch there (seconds)."""
    return _asked(host, peers, torch, timeout_s)[0]


def look(host: ConnectedHost, peers: Sequence[str], *, torch: bool, timeout_s: float) -> tuple[NodeFacts, Health]:
    """The same, and what may end a job there later. A torch that does not load in time is given SLOW_TORCH_S more."""
    facts, answer = _asked(host, peers, torch, timeout_s)
    if facts.torch_is_slow:
        facts, answer = _asked(host, peers, torch, SLOW_TORCH_S + SPARE_S, SLOW_TORCH_S)
    return facts, parse_health(host.node, answer)


def shared_folders(
    connections: Connections, nodes: Sequence[Node], facts: Mapping[str, NodeFacts]
) -> tuple[tuple[str, ...], ...]:
    """Groups of hosts that share one work folder: what the first of them leaves there, the others see. Only hosts are
    asked whose folders have one path and one inode, as cloned hosts have, too; of several nodes that are one machine
    the first.
    """
    alike = dict[tuple[object, ...], dict[str, Node]]()
    for node in nodes:
        if (known := facts.get(node.name)) and not known.workdir_error and known.workdir_inode is not None:
            place = known.workdir, known.workdir_inode, known.uid
            alike.setdefault(place, {}).setdefault(known.boot_id, node)
    found, waiting = [], [[*machines.values()] for machines in alike.values() if len(machines) > 1]
    while waiting:
        first, *others = waiting.pop()
        seen = _who_sees(connections, first, others)
        if seen:
            found.append((first.name, *(node.name for node in seen)))
        if len(rest := [node for node in others if node not in seen]) > 1:
            waiting.append(rest)
    return tuple(found)


def _who_sees(connections: Connections, first: Node, others: Sequence[Node]) -> list[Node]:
    """Over the connections that are open. Hosts that do not answer see nothing."""
    token = secrets.token_hex(8)

    def each(nodes: Sequence[Node], action: str, made: Any = ()) -> dict[str, dict[str, Any]]:
        def act(name: str) -> dict[str, Any]:
            host = connections.current(name)
            request = {"action": action, "workdir": host.workdir, "token": token, "made": made}
            return ask(host, "same_folder", request, timeout_s=SAME_FOLDER_S)

        return values(for_each({node.name: node.name for node in nodes}, act, deadline_s=SAME_FOLDER_S))

    left = each([first], "leave")
    if first.name not in left:
        return []
    try:
        looked = each(others, "look")
        return [node for node in others if looked.get(node.name, {}).get("there") is True]
    finally:
        each([first], "remove", left[first.name].get("made", []))


def _asked(
    host: ConnectedHost, peers: Sequence[str], torch: bool, timeout_s: float, longest_s: float | None = None
) -> tuple[NodeFacts, Mapping[str, Any]]:
    limit_s = min(longest_s or TORCH_S, max(timeout_s - SPARE_S, timeout_s / 2))
    request = {"workdir": host.workdir, "peers": list(peers[:MAX_PEERS]), "torch": torch, "limit_s": limit_s}
    sent_at = time.time()
    answer = ask(host, "probe", request, timeout_s=timeout_s)
    return parse_facts(host.node, answer, sent_at, time.time(), peers[:MAX_PEERS]), answer
