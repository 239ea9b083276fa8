"""Each host's speed in the course of a run: from the ranks' steps to the report's plot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.results import SPEED_POINTS as POINTS
from orchestrator.results import Summary
from orchestrator.results.analyse import analyse
from orchestrator.views import render_report, speed_chart
from tests.support.run_folders import Host, end, start, step, write_run


def of_steps(root: Path, first: list[Any], second: list[Any], **of_start: Any) -> Summary:
    ranks = {rank: [start(rank=rank, **of_start), *own, end()] for rank, own in enumerate((first, second))}
    return analyse(write_run(root, [Host("a2000"), Host("v100")], ranks))


def test_a_stretch_has_each_hosts_samples_over_what_its_slowest_rank_took(tmp_path: Path) -> None:
    """3 steps of warm-up, 20 of 100 ms with 10 and 30 samples, then 20 of 50 ms with 20 and 20."""
    first = [step(n, 10, 0, 80, 20, 0) for n in range(23)] + [step(n, 20, 0, 30, 20, 0) for n in range(23, 43)]
    second = [step(n, 30, 0, 60, 40, 0) for n in range(23)] + [step(n, 20, 0, 40, 9, 0) for n in range(23, 43)]
    course = of_steps(tmp_path, first, second).speed_course
    assert course.steps == (6, 10, 14, 18, 22, 26, 30, 34, 38, 42)
    speeds = {host.name: list(host.samples_per_s) for host in course.hosts}
    assert speeds == {"a2000": pytest.approx([100] * 5 + [400] * 5), "v100": pytest.approx([300] * 5 + [400] * 5)}


def test_what_happened_is_marked_once_and_never_behind_the_last_step(tmp_path: Path) -> None:
    steps = [step(n, 10, 0, 8, 2, 0) for n in range(43)]
    shares = {"event": "rebalance", "step": 12, "shares": [12, 8], "before": [10, 10], "spread": 0.4}
    looked = {"event": "eval", "epoch": 0, "step": 20, "samples": 10, "accuracy": 0.9, "loss": 0.1}
    kept = {"event": "checkpoint", "step": 20, "name": "step-20.pt", "bytes": 10, "write_ms": 3.0, "failure": None}
    late = {**looked, "step": 99}
    summary = of_steps(tmp_path, [*steps, shares, looked, kept, late], [*steps, shares, looked, late])
    found = [(mark.what, mark.step) for mark in summary.speed_course.marks]
    assert found == [("rebalance", 12), ("eval", 20), ("checkpoint", 20)]
    page = render_report(summary)
    (drawing,) = (
        each for each in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if "samples/s of each host over" in each
    )
    assert re.findall(r"stroke-dasharray=[^>]*stroke=\"([^\"]+)", drawing) == ["#d55e00", "#cc79a7", "var(--soft)"]
    assert all(f"</svg>{name}</span>" in page for name in ("shares changed", "evaluation", "checkpoint"))
    assert 'aria-label="samples/s of each host over seconds"' in page


def test_a_network_cut_over_the_hosts_has_one_speed(tmp_path: Path) -> None:
    steps = [step(n, 10, 0, 8, 2, 0) for n in range(43)]
    nothing = [step(n, 0, 0, 8, 2, 0) for n in range(43)]
    (together,) = of_steps(tmp_path, steps, nothing, work=0.5).speed_course.hosts
    assert together.name == "all hosts"
    assert together.samples_per_s == pytest.approx([1000] * 10)


def test_a_long_run_has_a_hundred_points_and_a_short_one_no_plot(tmp_path: Path) -> None:
    long, short = ([step(n, 10, 0, 8, 2, 0) for n in range(count)] for count in (1003, 10))
    summary = of_steps(tmp_path / "long", long, long)
    assert len(summary.speed_course.steps) == POINTS
    nothing = of_steps(tmp_path / "short", short, short)
    assert speed_chart(nothing) is None and "Over time" not in render_report(nothing)


def test_of_many_hosts_those_whose_speed_changed_most_are_drawn(tmp_path: Path) -> None:
    changing = [step(n, 1, 0, 8, 2, 0) for n in range(23)] + [step(n, 5, 0, 8, 2, 0) for n in range(23, 43)]
    even = [step(n, 10, 0, 8, 2, 0) for n in range(43)]
    ranks = {rank: [start(rank=rank), *(changing if rank == 10 else even), end()] for rank in range(11)}
    summary = analyse(write_run(tmp_path, [Host(f"host{rank}") for rank in range(11)], ranks))
    drawn = speed_chart(summary)
    assert drawn is not None
    assert len(drawn.lines) == 9 and drawn.lines[-1].name == "host10"
    assert re.search(r"The 9 of 11 hosts whose speed changed most", render_report(summary))
