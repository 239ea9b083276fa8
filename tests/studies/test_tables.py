"""The tables of the studies of MNIST: published figures as published, speed-ups, and how rows learned."""

from __future__ import annotations

import pytest

from orchestrator.results.curves import Epoch
from orchestrator.results.published import BACKENDS, METHODS
from orchestrator.studies.ledger import Done, Outcome, RowRun, Spread, speed_up
from orchestrator.studies.tables import STUDIES
from orchestrator.views import documents, study_table

MNIST, METHOD = STUDIES["mnist_backends"], STUDIES["mnist_methods"]


def outcome(study, name, *seconds, cluster="t", **of_run):
    """So many runs, which took these times."""
    row = next(row for row in study.rows if row.name == name)
    runs = (RowRun(job="j", figures={"total_s": each, "accuracy": 0.99, "epoch_s": 1.0}, **of_run) for each in seconds)
    return Outcome(row, Done(cluster=cluster, runs=tuple(runs)) if seconds else None)


def test_times_and_speed_ups_stand_as_published_though_they_disagree():
    published = {row.cells: row.published for row in MNIST.rows}
    assert published == {
        ("NCCL", "1"): ("200.97", "1.00", "99.56 %"),
        ("NCCL", "2"): ("117.07", "1.67", "99.43 %"),
        ("NCCL", "4"): ("170.21", "2.22", "99.46 %"),
        ("NCCL", "8"): ("228.03", "2.86", "99.37 %"),
        ("Gloo", "1"): ("331.55", "1.25", "99.55 %"),
        ("Gloo", "2"): ("128.20", "1.25", "99.49 %"),
        ("Gloo", "4"): ("", "", ""),
        ("Gloo", "8"): ("126.65", "0.83", "99.34 %"),
    }
    assert "do not agree with each other" in MNIST.note


@pytest.mark.parametrize(("study", "table"), [(MNIST, BACKENDS), (METHOD, METHODS)])
def test_every_published_row_is_run_again(study, table):
    assert len([row for row in study.rows if any(row.published)]) == len(table.rows)


def test_every_rank_has_the_studys_batch():
    assert [row.settings["batch"] for row in MNIST.rows] == ["64", "128", "256", "512"] * 2
    assert {row.settings["batch"] for row in METHOD.rows} == {"64"}


def test_a_speed_up_compares_with_one_rank_of_the_same_back_end_on_the_same_cluster():
    rows = [outcome(MNIST, "gloo-1", 10.0, 12.0, 11.0), outcome(MNIST, "gloo-2", 5.0, 6.0, 5.5)]
    assert speed_up(MNIST, rows, rows[1]) == Spread(10 / 6, 2.0, 12 / 5)
    assert study_table.cells(MNIST, rows, rows[1])[2:5] == (
        "5.50 (5.00 to 6.00)",
        "99.00",
        "2.00 (1.67 to 2.40)",
    )
    assert study_table.cells(MNIST, rows, rows[0])[4] == "1.00"
    elsewhere = outcome(MNIST, "gloo-4", 5.0, cluster="another")
    nccl = outcome(MNIST, "nccl-2", 5.0)
    assert [speed_up(MNIST, [*rows, one], one) for one in (elsewhere, nccl, outcome(MNIST, "gloo-8"))] == [None] * 3
    measured = documents.sweep_json("mnist_backends", rows)["rows"][1]["measured"]
    assert (measured["figures"]["speed_up"], measured["least"]["total_s"]) == (2.0, 5.0)


def test_losses_and_classes_of_the_runs_stand_beneath_the_table(capsys):
    runs = [{"epochs": (Epoch(epoch=0, seconds=1, loss=loss),), "per_class": {"0": loss, "1": 0.5}} for loss in
            (0.25, 0.5, 0.75)]  # fmt: skip
    done = [outcome(METHOD, "spawn", 5.0, **run).done.runs[0] for run in runs]
    row = outcome(METHOD, "spawn").row
    study_table.print_study(METHOD, [Outcome(row, Done(cluster="t", runs=tuple(done)))])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["spawn", "0.5000"] in lines
    assert ["spawn", "50.0", "50.0"] in lines
    cut = done[0].model_copy(update={"epochs": ()})
    assert Done(cluster="t", runs=(cut, *done)).losses() == []
