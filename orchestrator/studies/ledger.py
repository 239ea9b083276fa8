"""Results of a study's rows: their runs, the spread of a figure over them, rows within noise of each other. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from pydantic import Field, model_validator

from orchestrator.planning.launch_plan import NodePlan
from orchestrator.record import SCHEMA, Record
from orchestrator.results.curves import Epoch
from orchestrator.studies.study import Study, StudyRow

SHORT_S = 60.0
"""A row whose first run took less is short: without `--repeats` it is run several times."""


class RowRun(Record):
    """One job of a row."""

    job: str
    figures: dict[str, float | None] = Field(default_factory=dict)
    valid: bool = True
    total_s: float | None = None
    """Its duration; None if not known."""
    epochs: tuple[Epoch, ...] = ()
    """Only in a study that `shows_learning`, as the next field."""
    per_class: dict[str, float] = Field(default_factory=dict)
    """The accuracy of each class, 0..1."""


@dataclass(frozen=True)
class Spread:
    """The spread of a figure over a row's runs."""

    least: float
    median: float
    most: float

    def overlaps(self, other: Spread) -> bool:
        return self.least <= other.most and other.least <= self.most


class Done(Record):
    """A row's collected runs, and the job that was started after them."""

    cluster: str
    hosts: str = ""
    """Its hosts, in a few words."""
    overrides: dict[str, str] = Field(default_factory=dict)
    runs: tuple[RowRun, ...] = ()
    begun: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_one_run(cls, value: Any) -> Any:
        """Reads older files, in which a row had one run."""
        if not isinstance(value, dict) or "job" not in value:
            return value
        run = {key: value[key] for key in ("job", "figures", "valid") if key in value}
        return {**value, "runs": [run]} if value.get("complete") else {**value, "begun": value["job"]}

    @property
    def is_short(self) -> bool:
        """Whether its first run took less than SHORT_S."""
        return bool(self.runs) and self.runs[0].total_s is not None and self.runs[0].total_s < SHORT_S

    @property
    def valid(self) -> bool:
        return all(run.valid for run in self.runs)

    def spread(self, figure: str) -> Spread | None:
        """None if a run lacks it."""
        return _spread([run.figures.get(figure) for run in self.runs])

    def losses(self) -> list[float]:
        """The median over its runs of each epoch's loss, up to the last epoch that all runs have."""
        runs = ([epoch.loss for epoch in run.epochs if epoch.loss is not None] for run in self.runs)
        return [statistics.median(losses) for losses in zip(*runs, strict=False)]

    def per_class(self) -> dict[str, float]:
        """The median over its runs of each class's accuracy, 0..1, for the classes that all runs have."""
        spreads = {name: _spread([run.per_class.get(name) for run in self.runs]) for name in self.runs[0].per_class}
        return {name: spread.median for name, spread in spreads.items() if spread}


def _spread(values: Sequence[float | None]) -> Spread | None:
    """None if any value is missing, or all."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return Spread(min(known), statistics.median(known), max(known))


class Ledger(Record):
    """`<out>/sweep-<study>.json`."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    rows: dict[str, Done] = Field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """One line of the table: done, or why it is not."""

    row: StudyRow
    done: Done | None
    why_not: str = ""


def speed_up(study: Study, outcomes: Sequence[Outcome], outcome: Outcome) -> Spread | None:
    """Time of the row it is relative to, by the row's own time (the study's first figure). The range is the widest that
    both rows' ranges allow. None unless both ran on the same cluster.
    """
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
    """Groups of rows in which each range of the study's first figure overlaps another. A row that was run once has no
    range and is in no group.
    """
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


# Chooses the hosts that run a row of a study, with the ranks of each; or gives the reason why none can. Pure.
#
# choose_nodes(row, plan.nodes, with_horovod)     {"a2000": 1, "v100": 1}, or the reason as a sentence

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
