"""The data files of the studies: checked as a whole, figures as published; speed-ups, and how rows learned."""

from __future__ import annotations

import pytest

from orchestrator.errors import InventoryError
from orchestrator.results import Epoch
from orchestrator.studies import Done, Outcome, RowRun, Spread, load_study, read_study, speed_up, study_names
from orchestrator.views import documents, study_table

MNIST, METHOD = load_study("mnist_backends"), load_study("mnist_methods")
SMALL = """\
title: t
source: s
columns: [ranks]
figures: [total_s]
published: [published s]
exp: mnist_lenet
report: {model: lenet, data: mnist, columns: {ranks: ranks, s: total_s}}
rows:
  - {name: one, cells: [1], settings: {batch: 64}, ranks: 1, published: [1.20]}
"""


@pytest.mark.parametrize("name", study_names())
def test_every_study_is_read(name):
    assert load_study(name).rows


def test_a_study_is_one_data_file(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    study = read_study(tmp_path / "small.yaml")
    (row,) = study.rows
    assert (row.cells, row.published, study.settings_of(row)) == (("1",), ("1.20",), {"batch": "64"})


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("ranks: 1,", "rank: 1,", 9, "unknown key 'rank'; did you mean `ranks`?"),
        ("source: s\n", "", 0, "`source` is missing"),
        ("[total_s]", "[totals_s]", 4, "figures[0]: 'totals_s' is not one of"),
        ("s: total_s", "s: none", 7, "report.columns.s: 'none' is not one of"),
        ("batch: 64", "batches: 64", 9, "row one: batches: no such setting"),
        ("[1.20]", "[1.20, 3]", 9, "row one: `published` has 2 values for 1 columns"),
        ("cells: [1]", "cells: [1, 2]", 9, "row one: `cells` has 2 values for 1 `columns`"),
        ("cells: [1]", "cells: [1], in_report: []", 9, "row one: has 1 values for the report's 2 columns"),
        ("ranks: 1,", "ranks: 1, against: two,", 9, "row one: `against` must name a row, not 'two'"),
        ("ranks: 1, ", "", 9, "row one: needs `hosts`, `ranks` or a `starter`"),
        ("[1.20]}", "[1.20]}\n  - {name: one, cells: [2], ranks: 2}", 10, "row one: an earlier row has the same name"),
    ],
)
def test_a_mistake_in_a_study_is_named_with_its_line(before, after, line, words, tmp_path):
    assert before in SMALL
    file = tmp_path / "small.yaml"
    file.write_text(SMALL.replace(before, after))
    with pytest.raises(InventoryError) as caught:
        read_study(file)
    found = [(mistake.file, mistake.line) for mistake in caught.value.mistakes if words in mistake.message]
    assert found == [(str(file), line)], str(caught.value)


def outcome(study, name, *seconds, cluster="t", **of_run):
    """So many runs, which took these times."""
    row = next(row for row in study.rows if row.name == name)
    runs = (RowRun(job="j", figures={"total_s": each, "accuracy": 0.99, "epoch_s": 1.0}, **of_run) for each in seconds)
    return Outcome(row, Done(cluster=cluster, runs=tuple(runs)) if seconds else None)


def test_times_and_speed_ups_stand_as_published_though_they_disagree():
    published = {row.cells: MNIST.published_of(row) for row in MNIST.rows}
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


def test_every_rank_has_the_studys_batch():
    assert [MNIST.settings_of(row)["batch"] for row in MNIST.rows] == ["64", "128", "256", "512"] * 2
    assert {METHOD.settings_of(row)["batch"] for row in METHOD.rows} == {"64"}


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
    measured = documents.study_json("mnist_backends", MNIST, rows)["rows"][1]["measured"]
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
