"""What ranks printed and a disk did not take, as their hosts report it. Pure.

    [*dropped_words(plan, records)]     ["a: the disk of its work folder was full or failed, 512 bytes of ..."]

records: the supervisors' (`agent.json`), by host; nothing in them is taken on trust.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.planning.launch_plan import LaunchPlan


def dropped_words(plan: LaunchPlan, records: Mapping[str, Any]) -> Iterator[str]:
    """As each host's record says; where that is no longer readable, as the master's says, which heard of it before."""
    heard = _mapping(records.get(plan.master), "dropped")
    for node in plan.nodes:
        ranks = _mapping(records.get(node.name), "ranks")
        for rank in map(str, node.rank_numbers):
            sizes = [_mapping(ranks, rank).get("dropped_bytes"), _mapping(heard, node.name).get(rank)]
            size = max((size for size in sizes if isinstance(size, int)), default=0)
            if 0 < size < 1 << 63:
                lost = f"{size} bytes of what rank {rank} printed are lost"
                yield f"{node.name}: the disk of its work folder was full or failed, {lost}; the job went on"


def _mapping(record: Any, key: str) -> Mapping[str, Any]:
    """What a host says under this key; {} where that is no object."""
    value = record.get(key) if isinstance(record, Mapping) else None
    return value if isinstance(value, Mapping) else {}
