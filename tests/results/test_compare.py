"""Collected runs side by side: from their folders to ratios, times to an accuracy, and what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.errors import OrchError
from orchestrator.results import Curves, EvaluationPoint, Moment, common_accuracy, seconds_to
from orchestrator.results.analyse import analyse
from orchestrator.results.compare import compare
from orchestrator.views import render_comparison
from tests.support.run_folders import steady_run


def test_a_run_that_takes_half_as_long_is_twice_as_fast(tmp_path: Path) -> None:
    slow, fast = steady_run(tmp_path / "slow", 88), steady_run(tmp_path / "fast", 38, seed=1, strategy="ddp")
    first, second = compare([slow, fast]).runs
    assert first.speed is not None and second.of_first is not None and first.of_first is None
    assert first.speed.value == pytest.approx(first.samples_per_s)
    assert 1.95 < second.of_first.low < 2.0 < second.of_first.high < 2.05
    assert second.verdict.startswith("2.00 times as fast as A (1.9")


def test_two_runs_of_the_same_thing_show_no_difference(tmp_path: Path) -> None:
    runs = [steady_run(tmp_path / str(seed), 50, seed=seed) for seed in range(2)]
    comparison = compare(runs)
    assert comparison.runs[1].verdict.startswith("no difference from A: ")
    assert comparison.differences == ()


def test_less_than_two_percent_is_no_difference_however_sure_the_steps_are(tmp_path: Path) -> None:
    """What changes from run to run is not in the steps of one."""
    near, far = (
        compare([steady_run(tmp_path / f"a{ms}", 88), steady_run(tmp_path / f"b{ms}", ms)]).runs[1] for ms in (87, 80)
    )
    assert near.of_first is not None and near.of_first.low > 1
    assert near.verdict.startswith("no difference") and far.verdict.startswith("1.09 times as fast")


def test_what_differs_is_listed_and_nothing_else(tmp_path: Path) -> None:
    one, two = steady_run(tmp_path / "one", 50), steady_run(tmp_path / "two", 50, batch=192, strategy="ddp")
    plan = json.loads(two.plan.read_text())
    plan["nodes"][1]["gpu"] = "RTX 3090"
    plan["nodes"][0]["bandwidth_bps"] = 1e9
    two.plan.write_text(json.dumps(plan))
    analyse(two)
    assert {each.what: each.values for each in compare([one, two]).differences} == {
        "strategy": ("allreduce", "ddp"),
        "batch": ("96", "192"),
        "a2000: bandwidth": ("2.5Gbps", "1Gbps"),
        "v100: GPU": ("Tesla V100-16GB", "RTX 3090"),
    }


def test_a_run_of_few_steps_is_not_compared(tmp_path: Path) -> None:
    whole, short = steady_run(tmp_path / "whole", 50), steady_run(tmp_path / "short", 50, warmup_steps=50)
    assert (
        compare([whole, short]).runs[1].verdict == "not compared: it takes 20 measured steps with known samples in both"
    )


def curve(*accuracies: float) -> Curves:
    """One evaluation after every tenth update; an update takes a second."""
    points = tuple(EvaluationPoint(step=10 * n + 9, accuracy=each) for n, each in enumerate(accuracies))
    course = tuple(Moment(step=n, seconds=n + 1, samples=64 * (n + 1)) for n in range(0, 10 * len(accuracies), 9))
    return Curves(evaluations=points, course=course)


def test_the_common_accuracy_is_the_highest_that_all_came_to() -> None:
    good, bad = curve(0.9, 0.98, 0.97), curve(0.8, 0.9, 0.95)
    assert common_accuracy([good, bad]) == 0.95
    assert common_accuracy([good, Curves()]) is None and common_accuracy([]) is None
    assert (seconds_to(good, 0.95), seconds_to(bad, 0.95)) == (20, 28)
    assert seconds_to(bad, 0.96) is None and seconds_to(Curves(evaluations=good.evaluations), 0.5) is None


def test_a_folder_without_its_steps_is_named(tmp_path: Path) -> None:
    run = steady_run(tmp_path / "run", 50)
    run.steps.write_bytes(b"nothing of the kind")
    with pytest.raises(OrchError, match=r"steps\.parquet"):
        compare([run, run])


def test_the_page_has_every_run_its_range_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    runs = [steady_run(tmp_path / "one", 50), steady_run(tmp_path / "two", 90, strategy="<b>ddp")]
    page = render_comparison(compare(runs))
    assert "B: 0.61 times as fast as A" in page
    assert page.count('<svg class="range"') == 2
    assert "&lt;b&gt;ddp" in page and "<b>ddp" not in page
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page
