"""Elastic jobs: what `--elastic MIN:MAX` changes in a launch plan. Pure.

    elastic = parse_elastic("2:3", max_restarts=3)
    arguments = elastic_arguments(elastic, node_rank=1, ranks=2, master_address="10.0.0.1", job="j-1")

torchrun's agents meet by its `c10d` rendezvous, whose store is the master's, and meet again when a rank dies or a host
is lost (`remote/verdict` says when that ends the job instead).

c10d sorts its agents by the address that each gives for itself, and the first one's is where the ranks meet; nobody
asks for the others'. So the master gives its address and the others a label that sorts behind every address, in the
order of their node ranks: rank 0, and with it the checkpoints, stays on the master, and the others keep their order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from orchestrator.errors import UsageError
from orchestrator.facts import NodeFacts
from orchestrator.records import Elastic
from orchestrator.request import RunRequest
from orchestrator.units import format_duration

DEFAULT_MAX_RESTARTS = 3
LAST_CALL_S = 10
"""Once MIN hosts have met, so long do they wait for the others."""
KEEP_ALIVE_S, KEEP_ALIVES = 3, 4
"""An agent that was not heard for this long, so often, is none any more: it has to go before the others can meet."""
CLOCKS_S = 5.0
"""c10d takes an agent for dead by comparing the hosts' times of day."""

ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""The ranks of each start get a store of their own: in the agents' (torch 2.4 on) lies what dead ranks left."""


def parse_elastic(text: str, max_restarts: int) -> Elastic:
    """Raises UsageError."""
    found = re.fullmatch(r"(\d{1,5}):(\d{1,5})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"--elastic {text}: expected MIN:MAX, numbers of nodes, 1 <= MIN <= MAX", "like --elastic 2:3")
    return Elastic(min_nodes=int(found[1]), max_nodes=int(found[2]), max_restarts=max_restarts)


def check_elastic(elastic: Elastic, facts: Mapping[str, NodeFacts]) -> None:
    """facts: of the nodes that were chosen. Raises UsageError."""
    if elastic.max_nodes > len(facts):
        least = min(elastic.min_nodes, len(facts))
        raise UsageError(
            f"--elastic {elastic.min_nodes}:{elastic.max_nodes}: {len(facts)} nodes take part, not {elastic.max_nodes}",
            f"--elastic {least}:{len(facts)}, or more nodes",
        )
    offsets = {name: node.clock_offset_s for name, node in facts.items()}
    slowest, fastest = min(offsets, key=offsets.__getitem__), max(offsets, key=offsets.__getitem__)
    apart_s = offsets[fastest] - offsets[slowest]
    if apart_s > CLOCKS_S:
        raise UsageError(
            f"--elastic: the clocks of {slowest} and {fastest} are {format_duration(apart_s)} apart, and torchrun "
            "would take a living host for dead",
            "enable NTP on both, or run without --elastic",
        )


def elastic_arguments(
    elastic: Elastic, node_rank: int, ranks: int, master_address: str, job: str
) -> dict[str, str | int]:
    """torchrun's options where they differ from those of a static job."""
    is_master = node_rank == 0
    host = f"[{master_address}]" if ":" in master_address else master_address
    timing = f"keep_alive_interval={KEEP_ALIVE_S},keep_alive_max_attempt={KEEP_ALIVES}"
    return {
        "--nnodes": f"{elastic.min_nodes}:{elastic.max_nodes}",
        "--nproc-per-node": ranks,
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"{host}:{{rendezvous_port}}",
        "--rdzv-id": job,
        "--rdzv-conf": f"is_host={int(is_master)},last_call_timeout={LAST_CALL_S},{timing}",
        "--local-addr": master_address if is_master else f"node-{node_rank:05}",
        "--max-restarts": elastic.max_restarts,
    }


def elastic_notes(elastic: Elastic, request: RunRequest, left_out: Sequence[str]) -> tuple[str, ...]:
    """left_out: nodes beyond MAX."""
    notes = []
    if left_out:
        notes.append(f"{', '.join(left_out)}: left out, --elastic takes at most {elastic.max_nodes} nodes")
    if request.kind == "experiment" and not request.settings.get("checkpoint_every"):
        notes.append(
            "elastic without checkpoints: ranks that are started anew begin at step 0; set checkpoint_every, like 500"
        )
    return tuple(notes)
