"""Takes what `remote/now.py` says of a host, puts it over what is remembered of it. Pure.

facts, health = as_of_now("v100", remembered, raw, sent_at, received_at)
facts.disk_free_bytes, health.uptime_s          # of this moment; `facts.torch` is that of the last `orch up`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.hosts.facts import Interface, NodeFacts
from orchestrator.hosts.health import Health
from orchestrator.hosts.network_answers import MAX_INTERFACES, speed_bps
from orchestrator.hosts.parse_facts import making_sense, parse_clock
from orchestrator.hosts.parse_health import parse_cards
from orchestrator.hosts.raw_answer import at_most, clean, mapping


def as_of_now(
    node: str, remembered: NodeFacts, raw: Any, sent_at: float, received_at: float
) -> tuple[NodeFacts, Health]:
    """sent_at, received_at: our wall clock around the question. Raises ProbeError where the answer makes no sense."""

    def read() -> tuple[NodeFacts, Health]:
        said = mapping(raw)
        known = {name: getattr(remembered, name) for name in NodeFacts.model_fields}
        update = {
            "disk_free_bytes": said["free"],
            "disk_free_inodes": said["inodes"],
            "shm_bytes": said["shm_bytes"],
            "interfaces": _interfaces(remembered, said),
            **parse_clock({"wall_start": said["wall"], "wall_end": said["wall"]}, sent_at, received_at),
        }
        health = {"uptime_s": said["uptime_s"], "available_bytes": said["available_bytes"]}
        cards = parse_cards(said["cards"])
        return NodeFacts.of(**{**known, **update}), Health.of(**health, cards=cards)

    return making_sense(node, "what has changed", read)


def _interfaces(remembered: NodeFacts, said: Mapping[str, Any]) -> tuple[Interface, ...]:
    speeds = mapping(said["links"])
    up = {clean(name) for name in at_most(said["up"], MAX_INTERFACES)}
    return tuple(
        link.model_copy(update={"speed_bps": speed_bps(speeds.get(link.name)), "up": link.name in up})
        for link in remembered.interfaces
    )
