"""How a job's training ended reaches its person: a rank that left early, and a loss that is not a number."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.jobs import NotFinite, first_not_finite
from tests.support.job_states import PLAN
from tests.support.local_cluster import Place
from trainer.shared import NOT_FINITE

SCRIPT = """
import math, os, sys
import torch, trainer
from torch import nn

way = sys.argv[1]
network, data = nn.Linear(2, 1), [(torch.ones(2), torch.ones(1)) for _ in range(8)]
ranks = trainer.join(batch=4, epochs=4)
run = ranks.prepare(network, torch.optim.SGD(network.parameters(), lr=0.01), data)
for epoch in run.epochs():
    for inputs, targets in run.batches():
        loss = nn.functional.mse_loss(run.model(inputs), targets, reduction="sum")
        run.step(loss * math.nan if way == "nan" and (ranks.rank, epoch) == (1, 2) else loss)
    run.evaluate(lambda outputs, targets: {"accuracy": len(outputs) * 0.6}, data)
    if way == "leave" and ranks.rank == 1 and epoch == 1:
        break
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("training-ends"), sys.executable)
    (made.here / "proj/own.py").write_text(SCRIPT)
    yield made


def record(place: Place) -> dict[str, Any]:
    return dict(json.loads(place.types("jobs", "--json").stdout)["jobs"][0])


def test_the_rank_that_left_its_loop_is_the_first_cause(place: Place) -> None:
    done = place.types("run", "proj/own.py", "leave", code=1)
    cause = record(place)["first_failure"]
    assert (cause["node"], cause["rank"]) == ("b", 1), done.stderr
    assert "rank 1 on b, after update 4 of 8" in cause["log_line"]
    assert "first cause: b: rank 1 exited 1" in done.stderr


def test_a_loss_that_is_no_number_is_reported_everywhere(place: Place, tmp_path: Path) -> None:
    words = "loss nan since update 5 (epoch 3, b, rank 1)"
    done = place.types("run", "proj/own.py", "nan")
    assert (
        words in done.stderr and "warning: loss is nan in update 5 (epoch 3), rank 1 on b" in done.stdout + done.stderr
    )
    job = record(place)
    assert job["state"] == "succeeded" and job["not_finite"]["step"] == 4
    assert "loss nan" in place.types("jobs").stdout
    collected = place.types("collect", "--job", job["id"], "--out", str(tmp_path))
    assert f"test accuracy: 60.00 % ({words})" in collected.stdout and "Loss nan since" in collected.stderr
    page = (tmp_path / job["id"] / "report.html").read_text()
    assert f"test accuracy; {words}" in page
    compared = place.types("compare", str(tmp_path / job["id"]), str(tmp_path / job["id"]))
    assert "60.00 %, loss nan" in compared.stdout


def test_a_run_that_is_asked_to_stops_there(place: Place) -> None:
    done = place.types("run", "--set", "not_finite=stop", "proj/own.py", "nan", code=1)
    cause = record(place)["first_failure"]
    assert (cause["node"], cause["rank"]) == ("b", 1), done.stderr
    assert "loss is nan in update 5 (epoch 3), rank 1 on b: the run stops" in cause["log_line"]


def test_the_earliest_mark_counts_and_what_a_host_invents_does_not() -> None:
    def of(step: Any, **more: Any) -> dict[str, Any]:
        return {"not_finite": {"step": step, "epoch": 0, "loss": "nan", "of": "loss", **more}}

    records: dict[str, dict[str, Any]] = {
        PLAN.nodes[0].name: {"ranks": {"0": of(9)}},
        PLAN.nodes[1].name: {"ranks": {"1": of(7), "0": of(1)}},
    }
    found = first_not_finite(PLAN, records, None)
    assert found == NotFinite(node=PLAN.nodes[1].name, rank=1, step=7, epoch=0, loss="nan")
    large = (of(10**400), of(2, epoch=10**400))  # no number of a run, and no float
    for odd in (of(-1), of(2, loss="\x1b[2J"), of("1e99x"), {"not_finite": [1]}, [], "x", *large):
        broken = {PLAN.nodes[0].name: {"ranks": {"0": odd}}, PLAN.nodes[1].name: {"ranks": [odd]}}
        assert first_not_finite(PLAN, broken, found) == found
        assert first_not_finite(PLAN, broken, None) is None


def test_both_sides_know_the_mark_by_one_name() -> None:
    from orchestrator.remote.rank import NOT_FINITE as read

    assert read == f"metrics.jsonl{NOT_FINITE}"
