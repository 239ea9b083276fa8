"""What other programs are given of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.exports import began_at, scalars, settings_words, whole_run
from orchestrator.results import Summary
from orchestrator.results.analyse import analyse
from tests.support.run_folders import steady_run


def test_every_value_has_its_step_and_hosts_have_names_of_their_own(tmp_path: Path) -> None:
    summary = analyse(steady_run(tmp_path / "run", 88))
    found = {scalar.name for scalar in scalars(summary)}
    assert found == {"loss/training", "loss/test", "accuracy/test", "samples_per_s/a2000", "samples_per_s/v100"}
    (accuracy,) = [scalar for scalar in scalars(summary) if scalar.name == "accuracy/test"]
    assert (accuracy.step, accuracy.value) == (62, 0.97)
    assert whole_run(summary)["run/samples_per_s"] == pytest.approx(960, rel=0.01)
    assert whole_run(summary)["run/compute_ms/v100"] == pytest.approx(88, rel=0.01)
    assert settings_words(summary)["hosts"] == "a2000 (1 x RTX A2000), v100 (1 x Tesla V100-16GB)"
    assert began_at(summary) == 1795252320.0  # 2026-11-21T09:12:00Z


def test_what_is_not_known_is_not_there() -> None:
    empty = Summary(schema=1, job="x", experiment="x", state="failed", world_size=1)
    assert list(scalars(empty)) == []
    assert whole_run(empty) == {"run/measured_steps": 0.0}
    assert began_at(empty) == 0.0
