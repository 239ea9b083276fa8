"""A study goes on where it was left, and repeats rows in rounds."""

from __future__ import annotations

import contextlib
import json
import shutil
from types import SimpleNamespace

import pytest

from orchestrator.controller import Controller
from orchestrator.errors import HostError, HostsError, OrchError, UsageError
from orchestrator.hosts import Connections
from orchestrator.measuring import StudyRun
from orchestrator.paths import Home
from orchestrator.store import Store
from orchestrator.studies import Study, StudyRow, ledger
from orchestrator.views import documents, study_table
from tests.support.local_cluster import bring_up
from tests.support.plans import study_node
from tests.support.quick_python import quick_python

SHORT = {"data": "synthetic", "steps": "5", "warmup_steps": "1", "batch": "8", "eval_every": "0"}
ROWS = (
    StudyRow(name="pair", cells=("two",), settings={"strategy": "ddp"}, ranks=2, published=("1.0",)),
    StudyRow(name="none-can", cells=("x",), hosts=(("3090", 2),), published=("2.0",)),
    StudyRow(name="alone", cells=("one",), settings={"strategy": "none"}, ranks=1, published=("3.0",)),
)
STUDY = Study(
    title="t",
    source="s",
    columns=("ranks",),
    figures=("samples_per_s", "train_s"),
    published=("seconds",),
    exp="mnist_lenet",
    settings=SHORT,
    rows=ROWS,
)


def come_up(folder, python, ranks=1):
    """The home of somebody whose cluster of two local nodes is up."""
    nodes = "".join(f"  - {{name: {n}, address: 127.0.0.1, workdir: {folder}/{n}}}\n" for n in "ab")
    file = folder / "inventory.yaml"
    defaults = f'transport: local, device: cpu, ranks: {ranks}, python: {python}, env: {{OMP_NUM_THREADS: "1"}}'
    file.write_text(f"cluster: t\ndefaults: {{{defaults}}}\nnodes:\n{nodes}")
    home = Home(folder / "home")
    with Connections(home) as connections:
        bring_up(Controller(Store(home), connections), file)
    return home


@pytest.fixture(scope="module")
def quick_home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quick")
    return come_up(folder, quick_python(folder / "quick"))


@pytest.fixture
def bench(tmp_path, quick_home):
    """A study of three short rows, and runs of it on two local nodes on which nothing can be trained."""
    with study_runs(tmp_path, Home(shutil.copytree(quick_home.root, tmp_path / "home"))) as made:
        yield made


@pytest.fixture
def real_bench(tmp_path):
    """The same, on nodes that train."""
    with study_runs(tmp_path, come_up(tmp_path, quick_python(tmp_path / "quick", trains=True))) as made:
        yield made


@contextlib.contextmanager
def study_runs(tmp_path, home):
    with Connections(home) as connections:
        controller = Controller(Store(home), connections)

        def made(study=STUDY, **overrides):
            return StudyRun("short", study, controller, controller.store.cluster("t"), tmp_path / "out", overrides)

        yield made


class Watch:
    """Follows jobs to their end, or leaves the one named as a person's Ctrl-C would."""

    def __init__(self, controller, leave=None):
        self.controller, self.leave, self.seen = controller, leave, []

    def __call__(self, row, job):
        self.seen.append((row.name, job.id))
        if row.name == self.leave:
            raise KeyboardInterrupt
        for _ in job.follow():
            pass


def test_a_study_that_was_left_takes_up_its_own_job_again_and_runs_no_row_twice(real_bench):
    bench = real_bench
    first = bench()
    leaving = Watch(first.controller, leave="pair")
    with pytest.raises(KeyboardInterrupt):
        first.run(leaving, repeats=1)
    again = bench()
    watch = Watch(again.controller)
    outcomes = again.run(watch, repeats=1)
    (left,) = leaving.seen
    assert [outcome.row.name for outcome in outcomes] == ["pair", "none-can", "alone"]
    assert [run.job for run in outcomes[0].done.runs] == [left[1]], "the job that still ran was thrown away"
    assert outcomes[0].done.runs[0].figures["samples_per_s"] > 0
    assert outcomes[0].done.is_short
    assert outcomes[1].why_not.startswith("needs hosts with 2 x 3090")
    assert sum(name == "alone" for name, _ in watch.seen) == 1

    idle = Watch(again.controller)
    kept = bench().run(idle, repeats=1)
    assert idle.seen == []
    assert [outcome.done for outcome in kept] == [outcome.done for outcome in outcomes]
    document = documents.study_json("short", STUDY, kept)
    assert json.loads(json.dumps(document)) == document
    assert [row["why_not"] is None for row in document["rows"]] == [True, False, True]


def test_a_row_whose_ranks_the_trainer_spawns_has_the_figures_of_all_of_them(tmp_path):
    python = quick_python(tmp_path / "quick", torchrun=True)
    home = come_up(tmp_path, python, ranks=3)
    settings = {"data": "synthetic", "samples": "160", "batch": "32", "epochs": "1", "strategy": "ddp"}
    row = StudyRow(name="spawn", cells=("two",), settings=settings, ranks=2, starter="spawn", published=("1.0",))
    figures = ("samples_per_s", "epoch_s", "accuracy")
    study = STUDY.model_copy(update={"figures": figures, "settings": {}, "rows": (row,), "shows_learning": True})
    with study_runs(tmp_path, home) as made:
        one = made(study)
        (outcome,) = one.run(Watch(one.controller), repeats=2)
        seeds = [one.controller.store.plan(run.job).settings["seed"] for run in outcome.done.runs]
    run, _ = outcome.done.runs
    assert (outcome.done.hosts, len(run.per_class), len(run.epochs)) == ("2 x CPU", 10, 1)
    assert run.epochs[0].loss > 0 and all(run.figures.values())
    assert seeds == [0, 1]


def test_a_job_that_runs_on_but_cannot_be_followed_is_not_started_a_second_time(bench, monkeypatch):
    one = bench()
    (row, *_) = one.study.rows
    begun = ledger.Done(begun="j", cluster="t")
    running = SimpleNamespace(state="running")
    job = SimpleNamespace(plan="its plan", record=running, refresh=lambda: running, reach=dict)
    store = SimpleNamespace(plan=lambda job: "its plan")
    found = SimpleNamespace(store=store, jobs=SimpleNamespace(of={"its plan": job}.get))
    monkeypatch.setattr(one, "controller", found)

    def refused(*_):
        raise HostsError([HostError("a", "its key changed", "")])

    with pytest.raises(HostsError, match="its key changed"):
        one._find_again(row, begun, refused)
    assert one._find_again(row, begun, lambda *_: None).plan == "its plan"


def test_a_table_of_somebody_elses_is_not_written_over(bench, tmp_path):
    one = bench()
    one.out.mkdir()
    one.file.write_text("[]")
    with pytest.raises(UsageError, match="not a table of `orch study`"):
        one.run(Watch(one.controller))
    assert one.file.read_text() == "[]"


# ---- rows that are run more than once --------------------------------------------------------------------------------


class Jobs:
    """In place of jobs: each takes so many seconds, and gives the next of its row's figures."""

    def __init__(self, monkeypatch, speeds, *, total_s=5.0):
        self.speeds, self.total_s, self.rows = {name: list(of) for name, of in speeds.items()}, total_s, []
        monkeypatch.setattr(StudyRun, "_start", lambda one, row, nodes, runs, follow: self.start(row))
        monkeypatch.setattr(StudyRun, "_find_again", lambda *_: None)
        monkeypatch.setattr(StudyRun, "_run_of", lambda one, job, summary: self.run(job))

    def start(self, row):
        self.rows.append(row.name)
        plan, record = SimpleNamespace(cluster="t", nodes=()), SimpleNamespace(state="succeeded")
        return SimpleNamespace(id=row.name, plan=plan, record=record)

    def run(self, name):
        figures = {"samples_per_s": self.speeds[name].pop(0), "train_s": 1.0}
        return ledger.RowRun(job=name, figures=figures, total_s=self.total_s)


def study_run_of(bench):
    one = bench()
    collected = SimpleNamespace(errors={}, summary=None)
    one.controller = SimpleNamespace(collect=lambda job, out: collected)
    one._nodes = lambda: (study_node("a", None), study_node("b", None))
    return one


SPEEDS = {"pair": (50.0, 60.0, 52.0), "alone": (40.0, 41.0, 45.0)}


def test_short_rows_are_run_three_times_in_rounds_and_long_ones_once(bench, monkeypatch):
    jobs = Jobs(monkeypatch, SPEEDS)
    outcomes = study_run_of(bench).run(None)
    assert jobs.rows == ["pair", "alone"] * 3
    assert outcomes[0].done.spread("samples_per_s") == ledger.Spread(50, 52, 60)
    assert study_table.cells(STUDY, outcomes, outcomes[0]) == (
        "two",
        "52.0 (50.0 to 60.0)",
        "1.00",
        "1.0",
    )
    Jobs(monkeypatch, {})
    assert [outcome.done for outcome in study_run_of(bench).run(None)] == [outcome.done for outcome in outcomes]

    long = Jobs(monkeypatch, SPEEDS, total_s=90)
    (once, *_) = study_run_of(bench).run(None, again=True)
    assert long.rows == ["pair", "alone"]
    assert study_table.cells(STUDY, [once], once) == ("two", "50.0", "1.00", "1.0")
    more = Jobs(monkeypatch, SPEEDS)
    study_run_of(bench).run(None, repeats=2, only=["alone"])
    assert more.rows == ["alone"]


def test_figures_of_other_settings_do_not_count_as_done(bench, monkeypatch):
    Jobs(monkeypatch, SPEEDS)
    study_run_of(bench).run(None, repeats=1)
    jobs = Jobs(monkeypatch, SPEEDS)
    (only, *_) = study_run_of(lambda: bench(lr="0.01")).run(None, only=["pair"], repeats=1)
    assert jobs.rows == ["pair"]
    assert only.done.overrides == {"lr": "0.01"}


def test_a_row_whose_job_fails_ends_the_study_with_its_name_and_is_run_again_the_next_time(bench, monkeypatch):
    """On these nodes the trainer does not find its torch."""
    study = STUDY.model_copy(update={"rows": ROWS[2:]})
    first = bench(study)
    with pytest.raises(OrchError, match=r"^alone: mnist_lenet-\S+ did not succeed"):
        first.run(Watch(first.controller))
    jobs = Jobs(monkeypatch, SPEEDS)
    (outcome,) = study_run_of(lambda: bench(study)).run(None, repeats=1)
    assert (jobs.rows, len(outcome.done.runs)) == (["alone"], 1)


def test_a_row_of_another_cluster_gets_no_run_of_this_one(bench, monkeypatch):
    Jobs(monkeypatch, SPEEDS)
    (there, *_) = study_run_of(bench).run(None, repeats=1)
    here = Jobs(monkeypatch, SPEEDS)
    one = study_run_of(bench)
    one.cluster = SimpleNamespace(name="another", facts={})
    assert one.run(None, repeats=3)[0].done == there.done
    assert here.rows == []


def outcome(name, *values):
    runs = tuple(ledger.RowRun(job=str(i), figures={"samples_per_s": value}) for i, value in enumerate(values))
    return ledger.Outcome(StudyRow(name=name, cells=(name,)), ledger.Done(cluster="t", runs=runs))


def test_rows_whose_ranges_overlap_are_within_noise():
    rows = [outcome("a", 1, 6), outcome("b", 9, 10), outcome("c", 2, 3), outcome("d", 5, 6), outcome("e", 7, 8)]
    (group,) = ledger.within_noise(STUDY, [*rows, outcome("once", 9.5), outcome("f", 11, None)])
    assert [row.name for row in group] == ["a", "c", "d"]
    assert ledger.within_noise(STUDY, rows[:2]) == []
    assert documents.study_json("short", STUDY, rows)["within_noise"] == [["a", "c", "d"]]


def test_a_table_of_one_run_a_row_is_read_as_it_was(bench, monkeypatch):
    one = study_run_of(bench)
    one.out.mkdir()
    kept = {"cluster": "t", "hosts": "2 x CPU", "overrides": {}, "figures": {"samples_per_s": 7.0}, "valid": True}
    rows = {"pair": {**kept, "job": "j", "complete": True}, "alone": {**kept, "job": "k", "complete": False}}
    one.file.write_text(json.dumps({"schema": 1, "rows": rows}))
    assert [run.figures for run in one._kept(one.study.rows[0]).runs] == [{"samples_per_s": 7.0}]
    assert (one._kept(one.study.rows[2]).runs, one._kept(one.study.rows[2]).begun) == ((), "k")
    jobs = Jobs(monkeypatch, SPEEDS)
    assert one.run(None)[0].done.hosts == "2 x CPU"
    assert "pair" not in jobs.rows
