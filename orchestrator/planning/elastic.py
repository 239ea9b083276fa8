"""Elastic jobs: what `--elastic MIN:MAX` asks for, and whether the nodes that were chosen do for it. Pure.

    elastic = parse_elastic("2:3", max_restarts=3)
    check_elastic(elastic, nodes=3)

How such a job goes on without a host is the hub's matter (`remote/generations`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from orchestrator.errors import UsageError
from orchestrator.planning.launch_plan import Elastic
from orchestrator.planning.request import RunRequest

DEFAULT_MAX_RESTARTS = 3


def parse_elastic(text: str, max_restarts: int) -> Elastic:
    """Raises UsageError."""
    found = re.fullmatch(r"(\d{1,5}):(\d{1,5})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"--elastic {text}: expected MIN:MAX, numbers of nodes, 1 <= MIN <= MAX", "like --elastic 2:3")
    return Elastic(min_nodes=int(found[1]), max_nodes=int(found[2]), max_restarts=max_restarts)


def check_elastic(elastic: Elastic, nodes: int, strategy: str | None = None) -> None:
    """nodes: how many were chosen. strategy: of a training of ours. Raises UsageError."""
    if strategy in ("pipeline", "tensor"):
        what = "a pipeline" if strategy == "pipeline" else "strategy tensor"
        raise UsageError(
            f"--elastic: {what} without one of its hosts lacks a part of the network",
            "leave --elastic out, or use --set strategy=ddp",
        )
    if elastic.max_nodes > nodes:
        least = min(elastic.min_nodes, nodes)
        raise UsageError(
            f"--elastic {elastic.min_nodes}:{elastic.max_nodes}: {nodes} nodes take part, not {elastic.max_nodes}",
            f"--elastic {least}:{nodes}, or more nodes",
        )


def elastic_notes(elastic: Elastic, request: RunRequest, left_out: Sequence[str]) -> tuple[str, ...]:
    """left_out: nodes beyond MAX."""
    notes = []
    if left_out:
        notes.append(f"{', '.join(left_out)}: left out, --elastic takes at most {elastic.max_nodes} nodes")
    if request.kind == "experiment" and not (request.training and request.training.checkpoint_every):
        notes.append("elastic without checkpoints: restarted ranks begin at step 0; set checkpoint_every, like 500")
    return tuple(notes)
