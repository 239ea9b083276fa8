"""Which hosts run a study's row, with how many ranks each; or why none can. Pure.

choose_nodes(row, plan.nodes, with_horovod)     {"a2000": 1, "v100": 1}, or the reason in a sentence
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from orchestrator.planning.launch_plan import NodePlan
from orchestrator.studies.rows import StudyRow

Chosen = Mapping[str, int]
"""The ranks that each host of a row has there: all that it has, or fewer."""


def hosts_words(nodes: Iterable[NodePlan]) -> str:
    return ", ".join(f"{node.ranks} x {node.gpu or 'CPU'}" for node in nodes)


def choose_nodes(row: StudyRow, nodes: Sequence[NodePlan], with_horovod: Collection[str] = ()) -> Chosen | str:
    """The most hosts that fit as they are, else the fewest of which a part fits; or why none of these can.

    with_horovod: the names of those that have that package.
    """
    if row.never:
        return row.never
    if row.needs_horovod:
        nodes = [node for node in nodes if node.name in with_horovod]
        if not nodes:
            return "needs the package horovod, which `orch up` has found on no host"
    if row.hosts:
        return _named_hosts(row, nodes)
    room = {node.name: ranks for node in nodes if (ranks := _room(row, node))}
    if not room:
        return f"needs {_gpus_words(row.gpus)}; the hosts have {hosts_words(nodes)}"
    chosen = _one_host(row.ranks, room) if row.starter else _exactly(row.ranks, room) or _parts(row.ranks, room)
    return chosen or _too_few(row, nodes)


def _gpus_words(gpus: int) -> str:
    return "a GPU for each rank" if gpus == 1 else f"{gpus} GPUs or more in one host"


def _too_few(row: StudyRow, nodes: Sequence[NodePlan]) -> str:
    least = row.ranks or 2
    of = "on one host" if row.starter else "in all"
    many = f"{least} ranks" if least > 1 else "1 rank"
    with_gpu = " with a GPU each" if row.gpus else ""
    return f"needs {many}{with_gpu} {of}, the hosts have {hosts_words(nodes)}; set `ranks` in the file"


def _room(row: StudyRow, node: NodePlan) -> int:
    """The ranks of this row for which the host has what they need."""
    return min(node.ranks, len(node.gpu_uuids) // row.gpus) if row.gpus else node.ranks


def _one_host(ranks: int, room: Chosen) -> Chosen:
    """The host that fits best: the one with the most ranks where the row takes all, else the one with the fewest."""
    fitting = {name: there for name, there in room.items() if there >= (ranks or 2)}
    if not fitting:
        return {}
    best = min(fitting, key=lambda name: fitting[name] if ranks else -fitting[name])
    return {best: ranks or fitting[best]}


def _exactly(ranks: int, room: Chosen) -> Chosen:
    """The most hosts that have so many together; {} where there are none."""
    best: dict[int, dict[str, int]] = {0: {}}
    for name, there in room.items():
        for total, hosts in list(best.items()):
            more = total + there
            if more <= ranks and (more not in best or len(best[more]) <= len(hosts)):
                best[more] = {**hosts, name: there}
    return best.get(ranks, {})


def _parts(ranks: int, room: Chosen) -> Chosen:
    """The fewest hosts that have so many or more: the last of them gives a part. {} where all have too few."""
    chosen: dict[str, int] = {}
    for name, there in sorted(room.items(), key=lambda host: -host[1]):
        if left := ranks - sum(chosen.values()):
            chosen[name] = min(there, left)
    return chosen if sum(chosen.values()) == ranks else {}


def _named_hosts(row: StudyRow, nodes: Sequence[NodePlan]) -> Chosen | str:
    for some in combinations(nodes, len(row.hosts)):
        if _are_named(row, some):
            return {node.name: node.ranks for node in some}
    wanted = " and ".join(f"{ranks} x {gpu}" for gpu, ranks in row.hosts)
    return f"needs hosts with {wanted}; there are {hosts_words(nodes)}"


def _are_named(row: StudyRow, nodes: Sequence[NodePlan]) -> bool:
    left = list(row.hosts)
    for node in nodes:
        match = next((host for host in left if host[0] in (node.gpu or "") and host[1] == node.ranks), None)
        if match is None:
            return False
        left.remove(match)
    return True
