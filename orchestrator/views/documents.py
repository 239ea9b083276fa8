"""The documents of `--json`, each built in one place. Pure.

What stands in them is read by programs: a key is never renamed, and a figure is never rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.errors import ConnectError, HostError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.facts import NodeFacts
from orchestrator.jobs.record import JobRecord
from orchestrator.units import format_bandwidth
from orchestrator.views.numbers import local_minute


def cluster_json(
    cluster: Cluster,
    silent: Mapping[str, HostError] | None = None,
    on_gpus: Mapping[str, NodeFacts] | None = None,
) -> dict[str, Any]:
    """The document of `orch up --json` and `orch status --json`. silent: as for `print_status`. on_gpus: who is on the
    GPUs now, of the nodes that said so; None: those that were there when the nodes were probed.
    """
    rows = []
    for node in cluster.nodes:
        facts = cluster.facts.get(node.name)
        gpu = node.gpu or (facts.gpus[0].name if facts and facts.gpus else None)
        count = node.gpus or (len(facts.gpus) if facts else 0)
        rows.append(
            {
                "name": node.name,
                "address": node.address or node.host,
                "id": node.id,
                "note": node.note,
                "gpu": f"{count}x {gpu}" if gpu and count > 1 else gpu or ("CPU" if facts else None),
                "bandwidth": format_bandwidth(node.bandwidth_bps) if node.bandwidth_bps else None,
                "image": node.image,
                "torch": facts.torch.version if facts and facts.torch else None,
                "venv": cluster.venvs[node.name].torch if node.name in cluster.venvs else None,
                "occupants": _occupants((cluster.facts if on_gpus is None else on_gpus).get(node.name)),
                "status": node_status(cluster, node.name, silent or {}),
                "answers": None if silent is None else node.name not in silent,
                "probed": cluster.probed.get(node.name),
                "added": local_minute(cluster.added.get(node.name)),
            }
        )
    return {
        "schema": 1,
        "cluster": cluster.name,
        "file": cluster.file,
        "master": cluster.master,
        "master_reason": cluster.master_reason,
        "nodes": rows,
        "problems": {name: problem.model_dump() for name, problem in cluster.problems.items()},
    }


def _occupants(facts: NodeFacts | None) -> list[dict[str, Any]] | None:
    """Every process on a GPU of the node; None where it is not known."""
    if facts is None:
        return None
    return [{"gpu": gpu.index, **occupant.model_dump()} for gpu in facts.gpus for occupant in gpu.occupants]


def node_status(cluster: Cluster, name: str, silent: Mapping[str, HostError]) -> str:
    if name in silent:
        return "no answer" if isinstance(silent[name], ConnectError) else "unusable"
    if name in cluster.released:
        return "released"
    if name in cluster.problems:
        return "unusable"
    if name == cluster.master:
        return "master"
    return "connected" if name in cluster.facts else "not probed"


def jobs_json(
    jobs: Sequence[JobRecord], unheard: Mapping[str, Mapping[str, HostError]] | None = None
) -> dict[str, Any]:
    """unheard: by job that may still run, the hosts that gave no answer."""
    when = ("started", "ended", "exit_code", "first_failure", "faults", "stall", "joined")
    keys = ("id", "state", "exp", "cluster", "nodes", *when)
    rows = [{key: job.model_dump(mode="json")[key] for key in keys} for job in jobs]
    return {"schema": 1, "jobs": [{**row, "unheard": list((unheard or {}).get(row["id"], ()))} for row in rows]}
