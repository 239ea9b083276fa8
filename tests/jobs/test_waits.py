"""One table of cases for who waits how long in a step: the formula, a run that is followed, one that is analysed."""

import json
from pathlib import Path

import pytest

from orchestrator.jobs import FilePiece, LiveView, wait_and_sync
from orchestrator.planning import LaunchPlan
from orchestrator.results import MetricsFile, read_events
from orchestrator.results.measure import measure
from tests.support.run_folders import Host, step, write_run

STEP_MS = 100.0
CASES = {
    # by rank (exposed_ms, comm_ms), then by rank (wait_ms, sync_ms)
    "nothing overlaps": ([(10, 10), (50, 50), (30, 30)], [(0, 10), (40, 10), (20, 10)]),
    "comm is not reported": ([(10, None), (50, None), (30, None)], [(0, 10), (40, 10), (20, 10)]),
    "all arrive together": ([(20, 20), (20, 20), (20, 20)], [(0, 20), (0, 20), (0, 20)]),
    "no network": ([(0, 0), (0, 0), (0, 0)], [(0, 0), (0, 0), (0, 0)]),
    "a wait hides behind backward": ([(5, 60), (5, 20), (5, 25)], [(5, 0), (0, 5), (5, 0)]),
    "a wait hides in part": ([(30, 60), (10, 20), (12, 25)], [(30, 0), (0, 10), (5, 7)]),
    "gradients hide, the network does not": ([(40, 90), (40, 90), (45, 95)], [(0, 40), (0, 40), (5, 40)]),
    "more exposed than under way": ([(50, 20), (10, 10), (10, 10)], [(10, 40), (0, 10), (0, 10)]),
}
BY_CASE = pytest.mark.parametrize(("lines", "expected"), CASES.values(), ids=CASES)


def step_lines(steps):
    """steps: (exposed_ms, comm_ms) of one rank."""
    comm = ({} if comm_ms is None else {"comm_ms": comm_ms} for _, comm_ms in steps)
    return [
        step(number, 32, 0, 0, exposed_ms, 0, t_ms=STEP_MS, **more)
        for number, ((exposed_ms, _), more) in enumerate(zip(steps, comm, strict=True))
    ]


@BY_CASE
def test_the_formula(lines, expected):
    under_way = [exposed if comm is None else comm for exposed, comm in lines]
    pairs = zip(lines, under_way, strict=True)
    assert [wait_and_sync(exposed, comm, min(under_way)) for (exposed, _), comm in pairs] == expected


@BY_CASE
def test_a_run_that_is_followed(lines, expected, tmp_path: Path):
    run = write_run(tmp_path, [Host(f"h{rank}") for rank in range(3)], {})
    view = LiveView(LaunchPlan.model_validate_json(run.plan.read_text()))
    for rank, line in enumerate(lines):
        content = "".join(json.dumps(one) + "\n" for one in step_lines([line])).encode()
        assert view.take(f"h{rank}", FilePiece(f"rank-{rank}/metrics.jsonl", rank, 0, content))
    shown = [(row.wait_share * STEP_MS, row.sync_share * STEP_MS) for row in view.progress().rows]
    assert shown == [pytest.approx(each) for each in expected]


def test_a_run_that_is_analysed(tmp_path: Path):
    """Each case is a step of one run."""
    ranks = [step_lines([lines[rank] for lines, _ in CASES.values()]) for rank in range(3)]
    run = write_run(tmp_path, [Host("h", 3)], dict(enumerate(ranks)), settings={"warmup_steps": 0})
    files = [MetricsFile("h", rank, run.metrics("h", rank)) for rank in range(3)]
    with read_events(files) as events:
        measure(events, LaunchPlan.model_validate_json(run.plan.read_text()))
        rows = events.connection.execute("SELECT wait_ms, sync_ms FROM timed ORDER BY step, rank").fetchall()
    assert [rows[3 * number : 3 * number + 3] for number in range(len(CASES))] == [each for _, each in CASES.values()]
