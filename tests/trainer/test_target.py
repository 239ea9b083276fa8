"""A run that is over when it has reached its target accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")

from tests.support.trainer_ranks import of_event, started, trained
from trainer.shared import SettingsError, parse_settings

SMALL = ["--exp", "mnist_lenet", "--data", "synthetic", "--device", "cpu", "--num_workers", "0", "--augment", "none"]
SMALL += ["--samples", "96", "--batch", "32", "--epochs", "3", "--checkpoint_every", "5"]


def run(folder: Path, *more: str) -> list[list[dict[str, Any]]]:
    folder.mkdir(exist_ok=True)
    return trained(folder, [*SMALL, "--checkpoint_dir", str(folder), *more], 2)


def test_it_ends_after_the_evaluation_that_reaches_it_with_a_checkpoint(tmp_path: Path) -> None:
    of_ranks = run(tmp_path, "--target_accuracy", "0.01")
    for lines in of_ranks:
        assert [one["step"] for one in of_event(lines, "step")] == [0, 1, 2]
        (reached,) = of_event(lines, "target")
        (evaluation,) = of_event(lines, "eval")
        assert (reached["epoch"], reached["step"], reached["samples"]) == (0, 2, 96)
        assert reached["accuracy"] == evaluation["accuracy"] >= 0.01
        assert 0 < reached["total_s"] <= lines[-1]["total_s"]
        assert (lines[-1]["event"], lines[-1]["status"]) == ("end", "succeeded")
    assert [one["name"] for one in of_event(of_ranks[0], "checkpoint")] == ["step-000000003.pt"]
    again = run(tmp_path, "--target_accuracy", "0.01", "--resume", str(tmp_path))
    for lines in again:
        assert [one["step"] for one in of_event(lines, "target")] == [2, 2]


def test_a_target_that_is_not_reached_changes_nothing(tmp_path: Path) -> None:
    for lines in run(tmp_path, "--target_accuracy", "0.999"):
        assert len(of_event(lines, "step")) == 9
        assert not of_event(lines, "target")


def test_paced_ranks_that_learn_nothing_are_refused_a_target(tmp_path: Path) -> None:
    paced = [{"ORCH_PACED": '{"samples_per_s": 1000}'}, {}]
    with started(tmp_path, [*SMALL[:-2], "--target_accuracy", "0.9"], 2, of_ranks=paced) as ranks:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert all("error: target_accuracy: a run with paced ranks trains no network" in line for line in said)


def test_a_target_without_evaluations_is_refused() -> None:
    with pytest.raises(SettingsError, match="eval_every: is 0, but target_accuracy needs evaluations"):
        parse_settings("mnist_lenet", {"target_accuracy": "0.9", "eval_every": "0"})
