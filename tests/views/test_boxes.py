"""Text on our pages never lies on other text, as a real browser lays it out, on narrow screens and on wide ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.results.analyse import analyse
from orchestrator.results.compare import compare
from orchestrator.views import render_comparison, write_report
from tests.results.test_timeline import ranks, run_of
from tests.support.browser import chromium
from tests.support.page_boxes import overlaps
from tests.support.run_folders import Host, end, start, steady_run, step, two_hosts, write_run
from tests.views.test_slowed import capped

FAILURE = {
    "node": "v100",
    "rank": 2,
    "exit_code": None,
    "signal": "SIGKILL",
    "reason": "rank 2 was killed",
    "kind": "rank",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


def two(folder: Path) -> Path:
    run = two_hosts(folder / "run", state="failed", first_failure=FAILURE)
    write_report(run, analyse(run))
    return run.report


def rebalanced(folder: Path) -> Path:
    """Two hosts, one slowed by its power cap, with changes of shares, evaluations and checkpoints close together."""
    events: dict[int, list[Any]] = {}
    for rank, samples in enumerate((10, 30)):
        events[rank] = [start(rank=rank), *(step(n, samples, 0, 80, 20, 0) for n in range(93))]
        for at in (12, 13, 40):
            events[rank].append(
                {"event": "rebalance", "step": at, "shares": [at, 40 - at // 2], "before": [20, 20], "spread": 0.4}
            )
        for epoch, at in enumerate((30, 60, 92)):
            looked = {
                "event": "eval",
                "epoch": epoch,
                "step": at,
                "samples": 10,
                "accuracy": 0.9 + epoch / 40,
                "loss": 0.1,
            }
            events[rank].append(looked)
        events[rank].append(end())
    events[0].insert(
        50, {"event": "checkpoint", "step": 41, "name": "step-41.pt", "bytes": 1000, "write_ms": 3.0, "failure": None}
    )
    names = ("a2000-of-the-third-rack-under-the-window", "v100")
    hosts = [Host(names[0]), Host(names[1], gpu="Tesla V100-16GB")]
    run = write_run(folder / "run", hosts, events, gpu={names[0]: capped(100, 43)})
    write_report(run, analyse(run))
    return run.report


def pipeline(folder: Path) -> Path:
    run = run_of(folder, ranks())
    write_report(run, analyse(run))
    return run.report


def compared(folder: Path) -> Path:
    runs = [
        steady_run(folder / name, ms, seed=place) for place, (name, ms) in enumerate((("a", 88), ("b", 88), ("c", 60)))
    ]
    path = folder / "compare.html"
    path.write_text(render_comparison(compare(runs)))
    return path


@pytest.mark.parametrize("made", [two, rebalanced, pipeline, compared])
def test_no_text_lies_on_other_text(made: Callable[[Path], Path], tmp_path: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto(made(tmp_path).as_uri())
    page.evaluate("() => document.querySelectorAll('details').forEach(each => each.open = true)")
    assert overlaps(page) == []
    page.close()


def test_two_texts_in_one_place_are_found(browser: Any) -> None:
    page = browser.new_page()
    page.set_content("<p>one</p><p style='margin-top: -2rem'>two</p>")
    assert overlaps(page, (900,)) == ["900: one | two"]
    page.close()
