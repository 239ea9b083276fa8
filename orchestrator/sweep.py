"""Runs a study's rows one after the other and keeps what came of each, so that a sweep goes on where it stopped.

    sweep = Sweep(study_name, controller, cluster, out, overrides={})
    for outcome in sweep.run(follow, only=["3090x2-ddp"]):
        outcome.row.name, outcome.figures["samples_per_s"], outcome.why_not

A row is remembered before its job starts. After an interruption its job is found again: followed if it still runs,
collected if it has ended well, started anew otherwise. Rows done on other clusters stay in the same table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from orchestrator.call import Host
from orchestrator.controller import Controller
from orchestrator.errors import OrchError, UsageError
from orchestrator.files import locked, own_folder, write_atomic
from orchestrator.records import FINAL_STATES, SCHEMA, LaunchPlan, NodePlan, Record
from orchestrator.request import read_wish
from orchestrator.store import Cluster
from orchestrator.studies import STUDIES, Row, Study, choose_nodes, hosts_words
from orchestrator.summary import Summary

Follow = Callable[[Row, LaunchPlan, Mapping[str, Host]], None]
"""Shows a job until its end."""


class Done(Record):
    """What is kept of a row: the job that ran it and, once that is collected, its figures."""

    job: str
    cluster: str
    hosts: str = ""
    """What it ran on, in a few words."""
    overrides: dict[str, str] = Field(default_factory=dict)
    figures: dict[str, float | None] = Field(default_factory=dict)
    complete: bool = False
    valid: bool = True


class Ledger(Record):
    """`<out>/sweep-<study>.json`."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    rows: dict[str, Done] = Field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """One line of the table: done, or why it is not."""

    row: Row
    done: Done | None
    why_not: str = ""


class Sweep:
    """overrides: settings that go before the rows' own; figures made under others do not count as done."""

    def __init__(
        self, name: str, controller: Controller, cluster: Cluster, out: Path, overrides: Mapping[str, str]
    ) -> None:
        self.study: Study = STUDIES[name]
        self.controller, self.cluster, self.out, self.overrides = controller, cluster, out, dict(overrides)
        self.file = out / f"sweep-{name}.json"

    def run(self, follow: Follow, *, only: Sequence[str] = (), again: bool = False) -> Iterator[Outcome]:
        """Every row in turn, as soon as it is done.

        Raises HostsError where the cluster cannot be used at all, OrchError where a row's job fails: what was done
        before is kept.
        """
        own_folder(self.out)
        with locked(self.out / f".{self.file.name}.lock"):
            nodes = self._nodes()
            for row in self.study.rows:
                kept = self._kept(row)
                chosen = choose_nodes(row, nodes)
                wanted = not only or row.name in only
                if not wanted or (kept and kept.complete and not again):
                    yield Outcome(row, kept if kept and kept.complete else None, "" if wanted else "not asked for")
                elif isinstance(chosen, str):
                    yield Outcome(row, None, chosen)
                else:
                    yield Outcome(row, self._measure(row, chosen, None if again else kept, follow))

    def _nodes(self) -> tuple[NodePlan, ...]:
        """The cluster's nodes as a plan sees them, with their ranks and GPUs."""
        first = self.study.rows[0]
        wish = read_wish(first.exp, (), None, None, ())
        return self.controller.plan(self.cluster, wish.request, wish.code).nodes

    def _measure(self, row: Row, nodes: tuple[str, ...], begun: Done | None, follow: Follow) -> Done:
        plan = self._find_again(row, begun, follow) or self._start(row, nodes, follow)
        if self.controller.store.job(plan.job).state != "succeeded":
            raise OrchError(
                f"{row.name}: {plan.job} did not succeed",
                f"see `orch logs --job {plan.job}`; the same command goes on with this row",
            )
        collected = self.controller.collect(plan, self.out)
        for error in collected.errors.values():
            raise error
        summary = collected.summary
        done = Done(
            job=plan.job,
            cluster=plan.cluster,
            hosts=hosts_words(plan.nodes),
            overrides=self.overrides,
            figures={name: FIGURES[name].of(summary) for name in self.study.figures},
            complete=True,
            valid=all(node.valid for node in summary.nodes),
        )
        self._keep(row, done)
        return done

    def _start(self, row: Row, nodes: tuple[str, ...], follow: Follow) -> LaunchPlan:
        pairs = [f"{key}={value}" for key, value in {**row.settings, **self.overrides}.items()]
        wish = read_wish(row.exp, pairs, None, None, ())
        plan = self.controller.plan(self.cluster, wish.request, wish.code, nodes)
        self._keep(row, Done(job=plan.job, cluster=plan.cluster, overrides=self.overrides))
        follow(row, plan, self.controller.launch(plan, wish.blob))
        return plan

    def _find_again(self, row: Row, begun: Done | None, follow: Follow) -> LaunchPlan | None:
        """The job that an interrupted sweep left for this row, at its end; None where it has to be run anew. Raises
        OrchError where it still runs and cannot be followed.
        """
        if begun is None or begun.cluster != self.cluster.name:
            return None
        try:
            record = self.controller.refresh(self.controller.store.job(begun.job))
            plan = self.controller.store.plan(begun.job)
        except OrchError:  # forgotten or damaged
            return None
        if record.state not in FINAL_STATES:
            hosts, _ = self.controller.hosts_of(plan)
            follow(row, plan, hosts)  # where this fails, the job runs on: another one beside it would disturb both
            record = self.controller.store.job(begun.job)
        return None if record.state in FINAL_STATES - {"succeeded"} else plan

    def _kept(self, row: Row) -> Done | None:
        done = self._ledger().rows.get(row.name)
        return done if done and done.overrides == self.overrides else None

    def _keep(self, row: Row, done: Done) -> None:
        ledger = self._ledger()
        rows = {**ledger.rows, row.name: done}
        write_atomic(
            self.file, ledger.model_copy(update={"rows": rows}).model_dump_json(by_alias=True, indent=1) + "\n"
        )

    def _ledger(self) -> Ledger:
        try:
            return Ledger.model_validate_json(self.file.read_bytes())
        except FileNotFoundError:
            return Ledger(schema=SCHEMA)
        except (OSError, ValidationError) as error:
            raise UsageError(f"{self.file}: no sweep of ours ({type(error).__name__})", "move it away") from error


@dataclass(frozen=True)
class Figure:
    title: str
    digits: int
    of: Callable[[Summary], float | None]
    scale: float = 1.0


def _largest(summary: Summary, *parts: str) -> float | None:
    """Of all hosts, the sum of these parts of a step (ms); None where none is known."""
    sums = []
    for node in summary.nodes:
        values = [getattr(node, part) for part in parts]
        if None not in values:
            sums.append(sum(values))
    return max(sums) if sums else None


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _train_s(summary: Summary) -> float | None:
    """All updates at the pace of the measured ones."""
    step_ms = _step_ms(summary)
    return None if step_ms is None else step_ms * (summary.steps + summary.warmup_steps_left_out) / 1000


def _step_ms(summary: Summary) -> float | None:
    return _largest(summary, "load_ms", "compute_ms", "sync_ms", "wait_ms", "optim_ms")


FIGURES: dict[str, Figure] = {
    "samples_per_s": Figure("samples/s", 1, lambda summary: summary.samples_per_s),
    "step_ms": Figure("step ms", 1, _step_ms),
    "sync_ms": Figure("sync ms", 1, lambda summary: _largest(summary, "sync_ms")),
    "wait_ms": Figure("wait ms", 1, lambda summary: _largest(summary, "wait_ms")),
    "efficiency": Figure("of the sum", 3, lambda summary: summary.efficiency),
    "train_s": Figure("train s", 2, _train_s),
    "load_s": Figure("load s", 4, lambda summary: _seconds(_largest(summary, "load_ms"))),
    "update_s": Figure(
        "update s", 4, lambda summary: _seconds(_largest(summary, "compute_ms", "sync_ms", "wait_ms", "optim_ms"))
    ),
    "total_s": Figure("total s", 2, lambda summary: summary.total_s),
    "accuracy": Figure("accuracy %", 2, lambda summary: summary.accuracy, scale=100),
}
"""What a study's table may hold; times of a step are the largest of all hosts."""


def cells(study: Study, outcome: Outcome) -> tuple[str, ...]:
    """A line of the table: the study's columns, the measured figures, where they come from, the published ones."""
    figures: list[str] = ["-"] * len(study.figures)
    if outcome.done:
        measured = outcome.done.figures
        figures = [_shown(FIGURES[name], measured.get(name)) for name in study.figures]
    return (*outcome.row.cells, *figures, *outcome.row.published)


def titles(study: Study) -> tuple[str, ...]:
    return (*study.columns, *(FIGURES[name].title for name in study.figures), *study.published)


def document(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What `orch sweep --json` prints."""
    study = STUDIES[name]
    rows = [
        {
            "name": outcome.row.name,
            **dict(zip(study.columns, outcome.row.cells, strict=True)),
            "measured": outcome.done.model_dump() if outcome.done else None,
            "published": dict(zip(study.published, outcome.row.published, strict=True)),
            "why_not": outcome.why_not or None,
        }
        for outcome in outcomes
    ]
    return {"schema": SCHEMA, "study": name, "source": study.source, "rows": json.loads(json.dumps(rows))}


def _shown(figure: Figure, value: float | None) -> str:
    return "-" if value is None else f"{value * figure.scale:.{figure.digits}f}"
