"""Results of a study's rows, and the choice of hosts for a row. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import Any

from pydantic import Field, model_validator

from orchestrator.planning.launch_plan import NodePlan
from orchestrator.record import SCHEMA, Record
from orchestrator.results.curves import Epoch
from orchestrator.studies.study import Need, Study, StudyRow

SHORT_S = 60.0
"""Shorter rows are repeated without `--repeats`."""


class RowRun(Record):
    job: str
    figures: dict[str, float | None] = Field(default_factory=dict)
    valid: bool = True
    total_s: float | None = None
    """None if unknown."""
    epochs: tuple[Epoch, ...] = ()
    """If the study `shows_learning`; also per_class."""
    per_class: dict[str, float] = Field(default_factory=dict)
    """Accuracy, 0..1."""


@dataclass(frozen=True)
class Spread:
    least: float
    median: float
    most: float

    def overlaps(self, other: Spread) -> bool:
        return self.least <= other.most and other.least <= self.most


class Done(Record):
    """begun: the job started after them."""

    cluster: str
    hosts: str = ""
    """In words."""
    overrides: dict[str, str] = Field(default_factory=dict)
    runs: tuple[RowRun, ...] = ()
    begun: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_one_run(cls, value: Any) -> Any:
        """Older files have one run per row."""
        if not isinstance(value, dict) or "job" not in value:
            return value
        run = {key: value[key] for key in ("job", "figures", "valid") if key in value}
        return {**value, "runs": [run]} if value.get("complete") else {**value, "begun": value["job"]}

    @property
    def is_short(self) -> bool:
        return bool(self.runs) and self.runs[0].total_s is not None and self.runs[0].total_s < SHORT_S

    @property
    def valid(self) -> bool:
        return all(run.valid for run in self.runs)

    def spread(self, figure: str) -> Spread | None:
        """None if a run lacks it."""
        return _spread([run.figures.get(figure) for run in self.runs])

    def losses(self) -> list[float]:
        """Medians by epoch, up to the last epoch of all runs."""
        runs = ([epoch.loss for epoch in run.epochs if epoch.loss is not None] for run in self.runs)
        return [statistics.median(losses) for losses in zip(*runs, strict=False)]

    def per_class(self) -> dict[str, float]:
        """Medians of classes that all runs have."""
        spreads = {name: _spread([run.per_class.get(name) for run in self.runs]) for name in self.runs[0].per_class}
        return {name: spread.median for name, spread in spreads.items() if spread}


def _spread(values: Sequence[float | None]) -> Spread | None:
    """None if any value is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return Spread(min(known), statistics.median(known), max(known))


class Ledger(Record):
    """`<out>/study-<study>.json`."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    rows: dict[str, Done] = Field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    row: StudyRow
    done: Done | None
    why_not: str = ""


def speed_up(study: Study, outcomes: Sequence[Outcome], outcome: Outcome) -> Spread | None:
    """Time of the row `against` over the row's own, with the widest range. None unless both ran on the same cluster."""
    base = next((other.done for other in outcomes if other.row.name == outcome.row.against), None)
    if not base or not outcome.done or base.cluster != outcome.done.cluster:
        return None
    theirs, own = base.spread(study.figures[0]), outcome.done.spread(study.figures[0])
    if not theirs or not own or own.least <= 0:
        return None
    if base == outcome.done:
        return Spread(1.0, 1.0, 1.0)
    return Spread(theirs.least / own.most, theirs.median / own.median, theirs.most / own.least)


def within_noise(study: Study, outcomes: Sequence[Outcome]) -> list[list[StudyRow]]:
    """Groups of rows with overlapping ranges of the study's first figure, without rows that ran once."""
    found = []
    for outcome in outcomes:
        spread = outcome.done.spread(study.figures[0]) if outcome.done and len(outcome.done.runs) > 1 else None
        if spread:
            found.append((spread, outcome.row))
    groups: list[list[tuple[Spread, StudyRow]]] = []
    for spread, row in sorted(found, key=lambda each: (each[0].least, each[0].most)):
        near = groups and any(spread.overlaps(other) for other, _ in groups[-1])
        groups[-1].append((spread, row)) if near else groups.append([(spread, row)])
    return [[row for _, row in group] for group in groups if len(group) > 1]


# The choice of hosts for a row, with ranks of each, or the reason why none fits. Pure.
#
#     choose_nodes(row, plan.nodes, having)     {"a2000": 1, "v100": 1}, or the reason as a sentence

Chosen = Mapping[str, int]
"""Ranks to use by host."""


def hosts_words(nodes: Iterable[NodePlan]) -> str:
    return ", ".join(f"{node.ranks} x {node.gpu or 'CPU'}" for node in nodes)


_MISSING: Mapping[Need, str] = {
    "horovod": "needs the package horovod, which `orch up` has found on no host",
    "slurm": "needs Slurm, and no host was one of its nodes in service at `orch up`",
}


def choose_nodes(
    row: StudyRow, nodes: Sequence[NodePlan], having: Mapping[Need, Collection[str]] = MappingProxyType({})
) -> Chosen | str:
    """Returns as many whole hosts as fit, else the fewest, one of them in part; or the reason why none fits. having:
    the hosts that meet a need.
    """
    if row.needs:
        nodes = [node for node in nodes if node.name in having.get(row.needs, ())]
        if not nodes:
            return _MISSING[row.needs]
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
    """If ranks is 0, the largest host."""
    fitting = {name: there for name, there in free.items() if there >= (ranks or 2)}
    if not fitting:
        return {}
    best = min(fitting, key=lambda name: fitting[name] if ranks else -fitting[name])
    return {best: ranks or fitting[best]}


def _whole_hosts(ranks: int, free: Chosen) -> Chosen:
    """Exactly this number of ranks, or {}."""
    best: dict[int, dict[str, int]] = {0: {}}
    for name, there in free.items():
        for total, hosts in list(best.items()):
            more = total + there
            if more <= ranks and (more not in best or len(best[more]) <= len(hosts)):
                best[more] = {**hosts, name: there}
    return best.get(ranks, {})


def _in_part(ranks: int, free: Chosen) -> Chosen:
    """The last host in part; {} without enough ranks."""
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
