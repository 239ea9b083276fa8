"""Chooses the hosts that run a row of a study, with the ranks of each; or gives the reason why none can. Pure.

choose_nodes(row, plan.nodes, with_horovod)     {"a2000": 1, "v100": 1}, or the reason as a sentence
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from orchestrator.planning.launch_plan import NodePlan
from orchestrator.studies.study import StudyRow

Chosen = Mapping[str, int]
"""Host -> the ranks that the row uses of it: all, or fewer."""


def hosts_words(nodes: Iterable[NodePlan]) -> str:
    return ", ".join(f"{node.ranks} x {node.gpu or 'CPU'}" for node in nodes)


def choose_nodes(row: StudyRow, nodes: Sequence[NodePlan], with_horovod: Collection[str] = ()) -> Chosen | str:
    """As many whole hosts as fit, else the fewest hosts with one of them used in part; or the reason why none can.

    with_horovod: names of the hosts that have this package.
    """
    if row.never:
        return row.never
    if row.needs_horovod:
        nodes = [node for node in nodes if node.name in with_horovod]
        if not nodes:
            return "needs the package horovod, which `orch up` has found on no host"
    if row.hosts:
        return _named_hosts(row, nodes)
    free = {node.name: ranks for node in nodes if (ranks := _usable_ranks(row, node))}
    if not free:
        gpus = "a GPU for each rank" if row.gpus == 1 else f"{row.gpus} GPUs or more in one host"
        return f"needs {gpus}; the hosts have {hosts_words(nodes)}"
    chosen = _one_host(row.ranks, free) if row.starter else _whole_hosts(row.ranks, free) or _in_part(row.ranks, free)
    return chosen or _too_few(row, nodes)


def _too_few(row: StudyRow, nodes: Sequence[NodePlan]) -> str:
    least = row.ranks or 2
    of = "on one host" if row.starter else "in all"
    many = f"{least} ranks" if least > 1 else "1 rank"
    with_gpu = " with a GPU each" if row.gpus else ""
    return f"needs {many}{with_gpu} {of}, the hosts have {hosts_words(nodes)}; set `ranks` in the file"


def _usable_ranks(row: StudyRow, node: NodePlan) -> int:
    return min(node.ranks, len(node.gpu_uuids) // row.gpus) if row.gpus else node.ranks


def _one_host(ranks: int, free: Chosen) -> Chosen:
    """The smallest host with enough ranks; without a number of ranks, the largest host."""
    fitting = {name: there for name, there in free.items() if there >= (ranks or 2)}
    if not fitting:
        return {}
    best = min(fitting, key=lambda name: fitting[name] if ranks else -fitting[name])
    return {best: ranks or fitting[best]}


def _whole_hosts(ranks: int, free: Chosen) -> Chosen:
    """As many hosts as possible whose ranks add up to this number; {} if no hosts do."""
    best: dict[int, dict[str, int]] = {0: {}}
    for name, there in free.items():
        for total, hosts in list(best.items()):
            more = total + there
            if more <= ranks and (more not in best or len(best[more]) <= len(hosts)):
                best[more] = {**hosts, name: there}
    return best.get(ranks, {})


def _in_part(ranks: int, free: Chosen) -> Chosen:
    """The fewest hosts with enough ranks, the last one used in part; {} if all together have too few."""
    chosen: dict[str, int] = {}
    for name, there in sorted(free.items(), key=lambda host: -host[1]):
        if left := ranks - sum(chosen.values()):
            chosen[name] = min(there, left)
    return chosen if sum(chosen.values()) == ranks else {}


def _named_hosts(row: StudyRow, nodes: Sequence[NodePlan]) -> Chosen | str:
    for some in combinations(nodes, len(row.hosts)):
        if _match(row, some):
            return {node.name: node.ranks for node in some}
    wanted = " and ".join(f"{ranks} x {gpu}" for gpu, ranks in row.hosts)
    return f"needs hosts with {wanted}; there are {hosts_words(nodes)}"


def _match(row: StudyRow, nodes: Sequence[NodePlan]) -> bool:
    left = list(row.hosts)
    for node in nodes:
        match = next((host for host in left if host[0] in (node.gpu or "") and host[1] == node.ranks), None)
        if match is None:
            return False
        left.remove(match)
    return True
