"""Runs a study's rows and stores each result, so that an interrupted study resumes.

    study_run = StudyRun(name, load_study(name), controller, cluster, out, overrides={})
    for outcome in study_run.run(follow, only=["3090x2-ddp"], repeats=3):
        outcome.row.name, outcome.done.spread("samples_per_s"), outcome.why_not

Rows are repeated in rounds, so that a drifting speed affects all of them. A row is recorded before its job starts.
After an interruption its job is found again: followed if it runs, collected if it succeeded, else started again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from orchestrator.controller import Controller
from orchestrator.errors import OrchError, UsageError
from orchestrator.files import locked, own_folder, write_atomic
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.facts import NodeFacts
from orchestrator.jobs.job_store import FINAL_STATES
from orchestrator.jobs.running import RunningJob
from orchestrator.planning.job_spec import JobSpec
from orchestrator.planning.launch_plan import NodePlan
from orchestrator.planning.request import parse_job
from orchestrator.record import SCHEMA
from orchestrator.results.summary import Summary
from orchestrator.studies.ledger import Chosen, Done, Ledger, Outcome, RowRun, choose_nodes, hosts_words
from orchestrator.studies.study import FIGURES, Need, Study, StudyRow

Follow = Callable[[StudyRow, RunningJob], None]

IN_SERVICE = ("idle", "mix", "alloc")
"""States of a node of Slurm."""
REPEATS = 3
"""For a short row without `--repeats`."""


def _with_ranks(cluster: Cluster, chosen: Chosen) -> Cluster:
    nodes = (node.model_copy(update={"ranks": chosen.get(node.name, node.ranks)}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": tuple(nodes)})


def _having(facts: Mapping[str, NodeFacts]) -> dict[Need, list[str]]:
    return {
        "horovod": [name for name, each in facts.items() if each.torch and each.torch.horovod],
        "slurm": [name for name, each in facts.items() if each.slurm in IN_SERVICE],
    }


class StudyRun:
    """overrides: of the rows' settings; results with other overrides do not count."""

    def __init__(
        self,
        name: str,
        study: Study,
        controller: Controller,
        cluster: Cluster,
        out: Path,
        overrides: Mapping[str, str],
    ) -> None:
        self.study = study
        self.controller, self.cluster, self.out, self.overrides = controller, cluster, out, dict(overrides)
        self.file = out / f"study-{name}.json"
        self._older_file = out / f"sweep-{name}.json"

    def run(
        self, follow: Follow, *, only: Sequence[str] = (), again: bool = False, repeats: int | None = None
    ) -> list[Outcome]:
        """repeats: per row; None: REPEATS if its first run was short, else once. Raises HostsError if the cluster is
        unusable, OrchError if a job fails; earlier results are kept.
        """
        own_folder(self.out)
        with locked(self.out / f".{self.file.name}.lock"):
            if self._older_file.exists() and not self.file.exists():
                self._older_file.rename(self.file)
            nodes, rows = self._nodes(), self.study.rows
            asked = {row.name for row in rows if not only or row.name in only}
            done = {row.name: None if again and row.name in asked else self._kept(row) for row in rows}
            chosen = {row.name: choose_nodes(row, nodes, _having(self.cluster.facts)) for row in rows}
            for turn in range(repeats or REPEATS):
                for row in rows:
                    here = chosen[row.name]
                    if row.name in asked and not isinstance(here, str) and self._due(done[row.name], turn, repeats):
                        done[row.name] = self._measure(row, here, done[row.name], follow)
        return [self._outcome(row, done[row.name], chosen[row.name], row.name in asked) for row in rows]

    def _due(self, done: Done | None, turn: int, repeats: int | None) -> bool:
        """Results of another cluster stay unchanged."""
        if done is None or not done.runs:
            return True
        return done.cluster == self.cluster.name and len(done.runs) <= turn and (repeats is not None or done.is_short)

    def _outcome(self, row: StudyRow, done: Done | None, chosen: Chosen | str, asked: bool) -> Outcome:
        done = done if done and done.runs else None
        why_not = "" if done or not isinstance(chosen, str) else chosen
        return Outcome(row, done, why_not if asked else "not asked for")

    def _nodes(self) -> tuple[NodePlan, ...]:
        """With ranks and GPUs, as planned."""
        of_hosts = {name: value for name, value in self.overrides.items() if name == "device"}
        job = parse_job(JobSpec(exp=self.study.exp, settings=of_hosts))
        return self.controller.choice.plan(self.cluster, job.request, job.code).nodes

    def _measure(self, row: StudyRow, chosen: Chosen, before: Done | None, follow: Follow) -> Done:
        runs = before.runs if before else ()
        job = self._find_again(row, before, follow) or self._start(row, chosen, runs, follow)
        if job.record.state != "succeeded":
            raise OrchError(
                f"{row.name}: {job.id} did not succeed",
                f"see `orch logs --job {job.id}`; the same command resumes with this row",
            )
        collected = self.controller.collect(job, self.out)
        for error in collected.errors.values():
            raise error
        done = Done(
            cluster=job.plan.cluster,
            hosts=hosts_words(job.plan.nodes),
            overrides=self.overrides,
            runs=(*runs, self._run_of(job.id, collected.summary)),
        )
        self._keep(row, done)
        return done

    def _run_of(self, job: str, summary: Summary) -> RowRun:
        return RowRun(
            job=job,
            figures={name: FIGURES[name].of(summary) for name in self.study.figures},
            valid=all(node.valid for node in summary.nodes),
            total_s=summary.total_s,
            epochs=tuple(summary.curves.epochs) if self.study.shows_learning else (),
            per_class=summary.accuracy_per_class if self.study.shows_learning else {},
        )

    def _start(self, row: StudyRow, chosen: Chosen, runs: tuple[RowRun, ...], follow: Follow) -> RunningJob:
        seed = {"seed": str(len(runs))}  # accuracy has a range, too
        settings = {**seed, **self.study.settings_of(row), **self.overrides}
        asked = parse_job(JobSpec(exp=self.study.exp, settings=settings))
        request = replace(asked.request, starter=row.starter)
        plan = self.controller.choice.plan(_with_ranks(self.cluster, chosen), request, asked.code, tuple(chosen))
        begun = Done(cluster=plan.cluster, hosts=hosts_words(plan.nodes), overrides=self.overrides, runs=runs)
        self._keep(row, begun.model_copy(update={"begun": plan.job}))
        job = self.controller.launch(plan, asked.blob)
        follow(row, job)
        return job

    def _find_again(self, row: StudyRow, before: Done | None, follow: Follow) -> RunningJob | None:
        """The ended job that an interrupted run left; None to run the row again. Raises OrchError if the job runs and
        cannot be followed.
        """
        if before is None or before.begun is None or before.cluster != self.cluster.name:
            return None
        try:
            job = self.controller.jobs.of(self.controller.store.plan(before.begun))
            record = job.refresh()
        except OrchError:  # forgotten or damaged
            return None
        if record.state not in FINAL_STATES:
            job.reach()
            follow(row, job)  # if this fails, the job runs on: a second job would disturb both
            record = job.record
        return None if record.state in FINAL_STATES - {"succeeded"} else job

    def _kept(self, row: StudyRow) -> Done | None:
        done = self._ledger().rows.get(row.name)
        return done if done and done.overrides == self.overrides else None

    def _keep(self, row: StudyRow, done: Done) -> None:
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
            raise UsageError(
                f"{self.file}: not a table of `orch study` ({type(error).__name__})", "move it away"
            ) from error
