"""A run as it goes: metrics folded into a row a host, and how a person sees them on a terminal and on a pipe."""

from __future__ import annotations

import codecs
import fcntl
import io
import itertools
import json
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from orchestrator.jobs import (
    KEPT_STEPS,
    Bars,
    Beat,
    FilePiece,
    HostRow,
    JobRecord,
    LiveView,
    LogLine,
    Notice,
    RunProgress,
    Silence,
    Standstill,
    follow,
)
from orchestrator.planning import CodeFolder, LaunchPlan, NodePlan
from orchestrator.views import console, following
from orchestrator.views import following as progress
from tests.support import forks
from tests.support.quick_python import quick_python
from trainer.shared import LINE_LIMIT

ORCH = [sys.executable, "-m", "orchestrator.cli"]
ROW = HostRow("a2000", 120, 938, 333.3, 0.3124, 0.41, 0.2)


def plan_of(**ranks: int) -> LaunchPlan:
    nodes, first = [], 0
    for name, count in ranks.items():
        nodes.append(NodePlan(name=name, node_rank=len(nodes), first_rank=first, ranks=count, address="127.0.0.1",
                              interface=None, device="cpu", gpu=None, python="python", workdir="/w", torchrun=(),
                              command=()))  # fmt: skip
        first += count
    return LaunchPlan(schema=1, job="j", exp="e", kind="script", cluster="c", master=nodes[0].name, master_address="m",
                      rendezvous_port=1, world_size=first, created="now", nodes=tuple(nodes),
                      code=CodeFolder(sha256="0", source=".", files=0, size_bytes=0))  # fmt: skip


class Feed:
    """A view, and the metrics files that it is shown piece by piece."""

    def __init__(self, **ranks: int) -> None:
        self.plan = plan_of(**ranks)
        self.view = LiveView(self.plan)
        self.offsets: dict[int, int] = {}

    def send(self, rank: int, data: bytes, offset: int | None = None) -> bool:
        node = next(n for n in self.plan.nodes if rank in n.rank_numbers)
        at = self.offsets.get(rank, 0) if offset is None else offset
        self.offsets[rank] = at + len(data)
        return self.view.take(node.name, FilePiece(f"rank-{rank}/metrics.jsonl", rank, at, data))

    def step(self, rank: int, step: int, **fields: object) -> bool:
        return self.send(rank, line(event="step", **{"step": step, "samples": 10, "t_ms": 100.0, **fields}))

    def rows(self) -> dict[str, HostRow]:
        return {row.node: row for row in self.view.progress().rows}


def line(**fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"


# ---- the fold -------------------------------------------------------------------------------------------------


def test_a_host_shows_its_step_its_ranks_speeds_together_and_their_mean_loss():
    feed = Feed(a=1, b=2)
    feed.send(0, line(event="start", schema=1, steps=938))
    for step in range(3):
        feed.step(0, step, samples=10, loss=20.0)
        feed.step(1, step, samples=30, loss=30.0)
        feed.step(2, step, samples=10, loss=50.0, t_ms=50.0)
    assert feed.rows()["a"] == HostRow("a", 3, 938, 100.0, 2.0, None, step_ms=100.0)
    assert feed.rows()["b"] == HostRow("b", 3, None, 500.0, 2.0, None, step_ms=100.0)


def test_a_loss_that_is_told_after_some_steps_alone_is_the_mean_of_those() -> None:
    feed = Feed(a=2, b=1)
    for step in range(4):
        feed.step(0, step, samples=10, **({"loss": 10.0 * step} if step % 2 else {}))
        feed.step(1, step, samples=10)
        feed.step(2, step, samples=10)
    assert [row.loss for row in feed.rows().values()] == [2.0, None]
    feed.step(0, 4, loss=None)  # what is no number is not left out of a mean
    feed.step(1, 4)
    assert feed.rows()["a"].loss is None


def fed_pipeline() -> Feed:
    """Rank 0 is the last stage and sees the labels, rank 1 reads the samples."""
    feed = Feed(a=1, b=1)
    for step in range(4):
        feed.step(0, step, samples=0, loss=20.0, exposed_ms=32.0, bubble_before_ms=30.0, bubble_behind_ms=0.0)
        feed.step(1, step, samples=10, loss=0.0, exposed_ms=5.0, bubble_before_ms=0.0, bubble_behind_ms=4.0)
    return feed


def test_a_pipelines_speed_and_loss_are_shown_once_and_no_stage_has_zeros() -> None:
    shown = fed_pipeline().view.progress(60.0)
    assert [(row.samples_per_s, row.loss) for row in shown.rows] == [(None, None)] * 2
    assert [(row.wait_share, row.sync_share) for row in shown.rows] == [
        (pytest.approx(0.3), pytest.approx(0.02)),
        (pytest.approx(0.04), pytest.approx(0.01)),
    ]
    assert (shown.together.step, shown.together.samples_per_s, shown.together.loss) == (4, 100.0, 2.0)
    assert progress.progress_lines(shown) == [
        "a: step 4, sync 2 %, wait 30 %",
        "b: step 4, sync 1 %, wait 4 %",
        "together: step 4, 100 samples/s, loss 2.00",
    ]


def test_the_table_of_a_pipeline_has_a_row_for_all_its_hosts_together() -> None:
    screen = Console(width=80, file=io.StringIO())
    screen.print(progress.progress_table(fed_pipeline().view.progress(60.0), 80))
    cells = [row.split() for row in screen.file.getvalue().splitlines()]
    assert cells[1:] == [
        ["a", "4", "-", "-", "2", "%", "30", "%"],
        ["b", "4", "-", "-", "1", "%", "4", "%"],
        ["together", "4", "100", "2.00", "-", "-"],
    ]


def test_a_pipeline_of_which_a_stage_has_not_reported_has_no_speed_yet() -> None:
    feed = Feed(a=1, b=1)
    feed.step(0, 0, samples=0, loss=20.0, exposed_ms=30.0, bubble_before_ms=30.0, bubble_behind_ms=0.0)
    shown = feed.view.progress(1.0)
    assert shown.together is None
    assert [(row.samples_per_s, row.loss) for row in shown.rows] == [(None, None)]


def test_a_paced_pipeline_has_no_loss() -> None:
    feed = Feed(a=1, b=1)
    for rank in (0, 1):
        feed.step(rank, 0, samples=10 * rank, loss=None, exposed_ms=5.0, bubble_before_ms=1.0, bubble_behind_ms=1.0)
    assert feed.view.progress().together.loss is None


def test_the_time_left_is_that_of_the_host_with_most_to_do():
    feed = Feed(a=1, b=1)
    assert feed.view.progress(3.0).left_s is None
    for rank in (0, 1):
        feed.send(rank, line(event="start", schema=1, steps=100))
        for step in range(20 + 30 * rank):
            feed.step(rank, step, t_ms=100.0 * (rank + 1))
    seen = feed.view.progress(65.0)
    assert seen.left_s == pytest.approx(10.0)  # b: 50 steps of 0.2 s; a: 80 of 0.1 s
    assert progress.time_words(seen) == "running 1:05, about 0:10 left"
    assert progress.time_words(RunProgress((ROW,), 93784.0)) == "running 1d 02:03:04"


def test_what_the_network_alone_holds_up_is_shown_beside_waiting():
    feed = Feed(fast=1, slow=1)
    for step in range(5):
        feed.step(0, step, exposed_ms=83.0)
        feed.step(1, step, exposed_ms=53.0)
    rows = feed.rows()
    assert (rows["fast"].wait_share, rows["fast"].sync_share) == pytest.approx((0.3, 0.53))
    assert (rows["slow"].wait_share, rows["slow"].sync_share) == pytest.approx((0.0, 0.53))


def test_a_rank_waits_for_the_one_whose_gradient_was_under_way_for_the_shortest_time():
    feed = Feed(fast=1, slow=1)
    for step in range(5):
        feed.step(0, step, exposed_ms=60.0)
        feed.step(1, step, exposed_ms=20.0)
    assert (feed.rows()["fast"].wait_share, feed.rows()["slow"].wait_share) == (0.4, 0.0)


def test_waiting_that_hid_behind_computing_does_not_count():
    feed = Feed(fast=2, slow=1)
    for step in range(5):
        feed.step(0, step, exposed_ms=30.0, comm_ms=90.0)  # 70 later than the last, and 30 of them seen
        feed.step(1, step, exposed_ms=30.0, comm_ms=30.0)
        feed.step(2, step, exposed_ms=20.0, comm_ms=20.0)
    assert feed.rows()["fast"].wait_share == pytest.approx((0.3 + 0.1) / 2)
    assert feed.rows()["slow"].wait_share == 0.0
    assert all(0 <= row.sync_share <= 1 for row in feed.rows().values())


def test_absurd_durations_give_no_absurd_figures():
    feed = Feed(a=1, b=1)
    feed.step(0, 0, t_ms=5e-324, samples=10**12, exposed_ms=500.0)
    feed.step(1, 0, exposed_ms=0.0)
    assert (feed.rows()["a"].samples_per_s, feed.rows()["a"].wait_share) == (None, 1.0)


def test_nobody_is_said_to_wait_while_a_rank_is_silent():
    feed = Feed(a=1, b=1)
    feed.step(0, 0, exposed_ms=60.0)
    assert [row.wait_share for row in feed.rows().values()] == [None]
    feed.step(1, 0)
    assert [row.wait_share for row in feed.rows().values()] == [None, None]


def test_only_the_newest_steps_that_all_ranks_have_count():
    feed = Feed(a=2)
    for step in range(100):
        feed.step(0, step, t_ms=100.0 if step < 50 else 10.0)
        feed.step(1, step, t_ms=100.0 if step < 50 else 10.0)
    for step in range(100, 130):
        feed.step(0, step, t_ms=1e6)
    assert feed.rows()["a"].samples_per_s == pytest.approx(2000)
    assert feed.rows()["a"].step == 100


def test_a_run_that_has_no_loss_shows_none():
    feed = Feed(a=1)
    feed.step(0, 0, loss=1.0)
    feed.step(0, 1, loss=None)
    assert feed.rows()["a"].loss is None


def test_a_script_that_writes_only_the_time_of_day_has_a_speed():
    feed = Feed(a=1)
    for step in range(4):
        feed.step(0, step, t_ms=None, wall=1000.0 + step / 2)
    assert feed.rows()["a"].samples_per_s == 20.0


def test_lines_cut_anywhere_are_read_once_they_are_whole():
    data = line(event="start", steps=4) + b"".join(
        line(event="step", step=step, samples=2, t_ms=1.0) for step in range(4)
    )
    feed = Feed(a=1)
    assert sum(feed.send(0, data[at : at + 7]) for at in range(0, len(data), 7)) == 4
    assert feed.rows()["a"] == HostRow("a", 4, 4, 2000.0, None, None, step_ms=1.0)


def test_a_file_that_restarts_is_a_new_beginning():
    feed = Feed(a=1)
    feed.send(0, line(event="start", steps=9))
    feed.step(0, 7)
    feed.send(0, line(event="step", step=0, samples=1, t_ms=1000.0), offset=0)
    assert feed.rows()["a"] == HostRow("a", 1, None, 1.0, None, None, step_ms=1000.0)


def test_after_a_gap_reading_goes_on_with_the_next_whole_line():
    feed = Feed(a=1)
    feed.step(0, 0)
    feed.send(0, b'{"event": "st')
    assert not feed.send(0, b'"step", "step": 50, "samples": 1}\n', offset=5000)
    feed.step(0, 60)
    assert feed.rows()["a"].step == 61


def test_a_step_reported_again_counts_once_as_reported_last():
    feed = Feed(a=1)
    feed.step(0, 0, samples=999)
    feed.step(0, 0, samples=10)
    assert feed.rows()["a"].samples_per_s == 100.0


def test_a_piece_of_many_lines_shows_its_total_and_its_newest_steps():
    lines = [line(event="step", step=step, samples=1, t_ms=1.0) for step in range(1000)]
    feed = Feed(a=1)
    feed.send(0, line(event="start", steps=5000) + b"".join(lines))
    assert feed.rows()["a"] == HostRow("a", 1000, 5000, 1000.0, None, None, step_ms=1.0)


def test_a_host_shows_the_parts_of_its_step() -> None:
    feed = Feed(a=1, b=1)
    for step in range(3):
        feed.step(0, step, load_ms=5.0, compute_ms=80.0, exposed_ms=10.0, comm_ms=10.0, optim_ms=5.0)
        feed.step(1, step, load_ms=5.0, compute_ms=30.0, exposed_ms=60.0, comm_ms=60.0, optim_ms=5.0)
    parts = {name: row.parts_ms for name, row in feed.rows().items()}
    assert parts["a"] == pytest.approx({"load": 5, "compute": 80, "sync": 10, "wait": 0, "optimiser": 5})
    assert parts["b"] == pytest.approx({"load": 5, "compute": 30, "sync": 10, "wait": 50, "optimiser": 5})
    feed.step(0, 3, compute_ms=80.0, exposed_ms=10.0, comm_ms=10.0)
    feed.step(1, 3, compute_ms=80.0, exposed_ms=10.0, comm_ms=10.0)
    assert feed.rows()["a"].parts_ms is None


def test_the_course_keeps_speed_and_loss_of_a_long_run_in_few_points() -> None:
    feed = Feed(a=1, b=1)
    for step in range(1000):
        feed.step(0, step, loss=20.0 if step < 500 else 10.0)
        feed.step(1, step, loss=20.0 if step < 500 else 10.0, t_ms=50.0)
    points = feed.view.course.points()
    assert 60 <= len(points) <= 120 and points[-1].step >= 1000
    assert {point.samples_per_s for point in points} == {300.0}
    assert (points[0].loss, points[-1].loss) == (2.0, 1.0)


def test_losses_without_known_samples_are_means() -> None:
    feed = Feed(a=1, b=1)
    for step in range(4):
        feed.step(0, step, samples=0, loss=1.0)
        feed.step(1, step, samples=0, loss=3.0)
    row = feed.rows()["a"]
    assert (row.samples_per_s, row.loss) == (None, 1.0)
    assert {(point.samples_per_s, point.loss) for point in feed.view.course.points()} == {(None, 2.0)}


def test_a_piece_of_many_lines_has_its_older_steps_in_the_course() -> None:
    feed = Feed(a=1)
    feed.send(0, b"".join(line(event="step", step=step, samples=1, t_ms=1.0, loss=2.0) for step in range(5000)))
    points = feed.view.course.points()
    assert len(points) > 30 and points[0].step < 200 and {point.loss for point in points} == {2.0}


def test_of_a_script_that_is_only_watched_the_first_step_has_no_time():
    """It began before anybody looked."""
    feed = Feed(a=1)
    feed.send(0, line(event="start", steps=9, samples_from="loader"))
    feed.send(0, line(event="step", step=0, samples=32, t_ms=16.0, exposed_ms=0.0, comm_ms=0.0))
    first = feed.rows()["a"]
    assert (first.step, first.samples_per_s, first.step_ms) == (1, None, None)
    for step in (1, 2):
        feed.send(0, line(event="step", step=step, samples=32, t_ms=1000.0, exposed_ms=100.0, comm_ms=100.0))
    later = feed.rows()["a"]
    assert (later.step, later.samples_per_s, later.step_ms, later.sync_share) == (3, 32.0, 1000.0, 0.1)


def test_memory_is_bounded_whatever_comes():
    feed = Feed(a=1)
    for step in range(3 * KEPT_STEPS):
        feed.step(0, step)
    feed.send(0, b'{"event": "')
    for _ in range(20):
        feed.send(0, b"x" * LINE_LIMIT)
    rank = feed.view._ranks[0]
    assert len(rank.steps) == KEPT_STEPS
    assert len(rank.lines.unfinished) <= LINE_LIMIT
    feed.send(0, b'"}\n')
    feed.step(0, 5000)
    assert feed.rows()["a"].step == 5001


@pytest.mark.parametrize(
    "bad",
    [
        {"step": -1}, {"step": 0.5}, {"step": True}, {"step": "0"}, {"step": None}, {"step": 1e400}, {"step": 10**400},
        {"samples": -5}, {"samples": None}, {"samples": [1]}, {"event": ["step"]}, {"event": "steps"},
    ],
)  # fmt: skip
def test_a_step_without_a_number_and_a_count_is_none(bad):
    feed = Feed(a=1)
    assert not feed.send(0, line(**{"event": "step", "step": 0, "samples": 1, **bad}))
    assert feed.rows() == {}


def test_other_files_other_nodes_and_foreign_ranks_are_no_news():
    feed, data = Feed(a=1, b=1), line(event="step", step=0, samples=1)
    metrics = "rank-0/metrics.jsonl"
    others = [("a", "rank-0/stdout.log", 0), ("a", "supervisor.log", None)]
    for node, file, rank in [*others, ("z", metrics, 0), ("b", metrics, 0), ("a", "rank-7/metrics.jsonl", 7)]:
        assert not feed.view.take(node, FilePiece(file, rank, 0, data))
    assert feed.rows() == {}


numbers = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from([5e-324, 1e12, 1e308, 10**400]),
    st.text(max_size=3), st.lists(st.integers(), max_size=2),
)  # fmt: skip
small = st.one_of(st.integers(0, 5), numbers)
steps = st.fixed_dictionaries(
    {"event": st.sampled_from(["step", "step", "step", "start", "end", 1])},
    optional={
        "step": small, "samples": small, "steps": small, "t_ms": numbers, "exposed_ms": numbers, "comm_ms": numbers,
        "loss": numbers, "wall": numbers,
    },
)  # fmt: skip
garbage = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"[" * 5000 + b"\n", b"9" * 5000 + b"\n", b'{"event":', b"\n", b"\xff\n", b"x" * (LINE_LIMIT + 5)]
    ),
)
pieces = st.tuples(
    st.integers(0, 2),
    st.one_of(st.lists(steps, max_size=4).map(lambda lines: b"".join(line(**fields) for fields in lines)), garbage),
    st.one_of(st.none(), st.none(), st.none(), st.just(0), st.integers(0, 10**6)),
)


@given(st.lists(pieces, max_size=15))
def test_whatever_the_files_hold_there_is_a_sensible_answer(sent):
    feed = Feed(a=1, b=2)
    for rank, data, offset in sent:
        feed.send(rank, data, offset)
        for row in feed.rows().values():
            assert row.step >= 1
            assert row.steps is None or row.steps >= 1
            assert row.samples_per_s is None or 0 <= row.samples_per_s < math.inf
            assert row.loss is None or math.isfinite(row.loss)
            assert row.wait_share is None or 0 <= row.wait_share <= 1
            assert row.sync_share is None or 0 <= row.sync_share <= 1
            assert progress.progress_words(row)


@given(st.lists(st.integers(0, 900), max_size=8))
def test_the_answer_is_the_same_however_the_bytes_are_cut(cuts):
    data = b"".join(line(event="step", step=step, samples=step, t_ms=7.0, loss=1.5) for step in range(12))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    whole, cut = Feed(a=1), Feed(a=1)
    whole.send(0, data)
    for a, b in itertools.pairwise(edges):
        if a < b:
            cut.send(0, data[a:b])
    assert cut.rows() == whole.rows()


def events_of(plan, items, remember=None):
    """What a person who follows a job sees of these items, to the end."""
    one = follow.Follow(plan, remember, until_end=True)
    return [*one.events(items), *one.last_words()]


def test_a_burst_of_news_gives_its_first_and_its_last_value(monkeypatch):
    lines = [line(event="step", step=step, samples=1, t_ms=1.0) for step in range(50)]
    offsets = itertools.accumulate((len(data) for data in lines), initial=0)
    burst = [("a", FilePiece("rank-0/metrics.jsonl", 0, at, data)) for at, data in zip(offsets, lines, strict=False)]
    monkeypatch.setattr(follow, "PROGRESS_S", 60.0)
    followed = events_of(plan_of(a=1), burst)
    assert [event.rows[0].step for event in followed] == [1, 50]


def test_the_clock_of_a_job_that_takes_no_step_goes_on(monkeypatch, capsys):
    piece = FilePiece("rank-0/metrics.jsonl", 0, 0, line(event="step", step=0, samples=1, t_ms=1.0))
    monkeypatch.setattr(follow, "BARS_S", -1.0)  # with each word that comes
    monkeypatch.setattr(follow, "PROGRESS_S", 0.0)
    monkeypatch.setattr(follow, "STILL_S", 0.0)
    events = events_of(plan_of(a=1), [("a", piece), ("", Beat()), ("", Beat())])
    stills = [event.still_s for event in events if isinstance(event, RunProgress)]
    assert len(stills) >= 3 and stills == sorted(stills) and stills[-1] > 0
    assert progress.time_words(RunProgress((ROW,), 65.0, still_s=25.0)) == "running 1:05, no step for 0:25"
    following.print_events(event for event in events if isinstance(event, RunProgress))
    assert capsys.readouterr().err.count("step 1") <= 1, "without a screen nothing is repeated"


def test_ranks_are_starting_until_the_first_line_or_metric_and_bars_come_folded(monkeypatch):
    offset, items = 0, [("", Beat()), ("", Beat())]
    for text in ("\r 1%", "\r 2%\r 3%", "\r 4%\nend\n"):
        items.append(("a", FilePiece("rank-0/stderr.log", 0, offset, text.encode())))
        offset += len(text)
    monkeypatch.setattr(follow, "BARS_S", -1.0)  # with each word that comes
    events = events_of(plan_of(a=1), items)
    assert [type(event) for event in events] == [Silence, Silence, Bars, Bars, tuple, Bars]
    assert [event.ranks for event in events[:2]] == [1, 1]
    texts = [[line.text for line in (event.lines if isinstance(event, Bars) else event)] for event in events[2:]]
    assert texts == [[" 1%"], [" 3%"], [" 4%", "end"], []]


def test_a_place_in_the_queue_is_said_once_every_host_has_told_its_own_and_so_is_the_start():
    """Ages change with each look, and alone are no news."""
    plan, waits, said = plan_of(a=1), follow.Waits(), []
    for at_s, state, words in [
        (0.0, "queued", "place 1, behind x (waits for 1.0s)"),
        (0.1, "queued", "place 2, behind x (waits for 1.1s)"),
        (1.0, "queued", "place 2, behind x (waits for 2.0s)"),
        (2.0, "queued", None),
        (3.0, "queued", "place 2, behind x (waits for 3m20s)"),
        (4.0, "starting", None),
        (9.0, "running", None),
    ]:
        waits.take(JobRecord.of(plan, state).model_copy(update={"waits_for": words}), at_s)
        assert waits.is_queued == (state == "queued")
        said += filter(None, [waits.news(at_s)])
    assert said == ["waits: place 2, behind x (waits for 2.0s)", "starts"]
    waits.take(JobRecord.of(plan, "failed").model_copy(update={"waits_for": "nobody"}), 10.0)
    assert waits.news(20.0) == ""


# ---- on a pipe ------------------------------------------------------------------------------------------------


def test_a_line_reads_as_a_person_says_it():
    assert progress.progress_words(ROW) == "a2000: step 120/938, 333 samples/s, loss 0.312, sync 20 %, wait 41 %"
    unknown = HostRow("v100", 1, None, None, None, None)
    assert progress.progress_words(unknown) == "v100: step 1, - samples/s, loss -, sync -, wait -"


def test_on_a_pipe_a_host_says_a_line_every_ten_seconds_and_a_last_one(monkeypatch, capsys):
    times = iter([100.0, 105.0, 110.5, 111.0, 112.0])
    monkeypatch.setattr(following.time, "monotonic", lambda: next(times))
    following.print_events([RunProgress((HostRow("a", step, 9, None, None, None),)) for step in range(1, 6)])
    said = capsys.readouterr()
    assert [text.partition(",")[0] for text in said.err.splitlines()] == ["a: step 3/9", "a: step 5/9"]
    assert said.out == ""


def test_on_a_pipe_a_standstill_is_said_once_and_an_alarm_comes_as_a_notice(capsys):
    alarm = "missed collective: rank 1"
    following.print_events([Standstill("still busy: rank 1"), Standstill(alarm, True), Notice(alarm), Standstill()])
    assert [line for line in capsys.readouterr().err.splitlines() if line] == [
        "still busy: rank 1",
        f"note: {alarm}",
    ]


def test_on_a_pipe_bars_and_silence_are_a_line_every_ten_seconds(monkeypatch, capsys):
    times = iter(range(100, 200, 5))
    monkeypatch.setattr(following.time, "monotonic", lambda: next(times))
    bars = [Bars((LogLine("a", 0, "stderr", f" {n} %"),)) for n in range(6)]
    following.print_events(
        [Silence(2, 4.0), Silence(2, 9.0), Silence(2, 14.0), *bars, (LogLine("a", 0, "stderr", "end"),)]
    )
    said = capsys.readouterr()
    assert said.err.splitlines() == ["2 ranks are starting (14 s)", "[a 0] 1 %", "[a 0] 3 %", "[a 0] 5 %"]
    assert said.out == "[a 0] end\n"


def test_a_long_silence_is_not_called_a_start():
    assert progress.silence_words(Silence(1, 12.4)) == "1 rank is starting (12 s)"
    assert progress.silence_words(Silence(8, 300.0)) == "no line and no metric from any rank so far (5:00)"


def test_a_script_without_metrics_shows_its_lines_alone(capsys):
    following.print_events([(LogLine("a", 0, "stdout", "hello"),)])
    assert capsys.readouterr() == ("[a 0] hello\n", "")


# ---- on a terminal --------------------------------------------------------------------------------------------


class Screen:
    """What a terminal of this width shows after these bytes, its scrolled-off lines included."""

    def __init__(self, width: int) -> None:
        self.width, self.cells, self.row, self.column, self.cursor = width, [[]], 0, 0, True
        self._torn = ""

    def show(self, text: str) -> None:
        """A read may end within a sequence: its beginning waits for the rest."""
        text = self._torn + text
        whole = re.sub(r"\x1b(\[[0-?]*)?$", "", text)
        self._torn = text[len(whole) :]
        for token in re.findall(r"\x1b\[[0-?]*[@-~]|[^\x1b]", whole):
            if token.startswith("\x1b["):
                self._obey(token[2:-1], token[-1])
            elif token == "\r":
                self.column = 0
            elif token == "\n":
                self._down()
            else:
                self._put(token)

    def lines(self) -> list[str]:
        return ["".join(cells).rstrip() for cells in self.cells]

    def _obey(self, argument: str, command: str) -> None:
        if command == "A":
            self.row = max(0, self.row - int(argument or 1))
        elif command == "K":
            assert argument == "2"
            self.cells[self.row] = []
        elif command in "hl" and argument == "?25":
            self.cursor = command == "h"
        else:
            assert command == "m", f"unknown sequence {argument}{command}"

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.cells):
            self.cells.append([])

    def _put(self, char: str) -> None:
        if self.column == self.width:
            self.column = 0
            self._down()
        cells = self.cells[self.row]
        cells += " " * (self.column + 1 - len(cells))
        cells[self.column] = char
        self.column += 1


def test_a_screen_shows_the_same_however_the_bytes_come():
    text = "above\r\n\x1b[1mnode\x1b[0m\r\nrow\r\x1b[2K\x1b[1A\x1b[2Knew\r\n\x1b[?25lend"
    once, torn = Screen(20), Screen(20)
    once.show(text)
    for char in text:
        torn.show(char)
    assert torn.lines() == once.lines() == ["above", "new", "end"]
    assert torn.cursor == once.cursor is False


class Terminal:
    """A program on a real pseudo-terminal, and its screen."""

    def __init__(self, argv: list[str], width: int, **environment: str) -> None:
        self.screen, self._changed = Screen(width), threading.Condition()
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        settings = {**os.environ, "TERM": "xterm", **environment}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            settings.pop(name, None)
        # In a session of its own whose terminal this is: a Ctrl-C typed there becomes a SIGINT.
        argv = ["setsid", "--ctty", *argv]
        self.process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=settings)
        os.close(theirs)
        self._ours = ours
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def until(self, pattern: str, within_s: float = 60) -> None:
        with self._changed:
            shown = self._changed.wait_for(lambda: re.search(pattern, self.text(), re.MULTILINE), within_s)
        assert shown, f"no {pattern} on:\n{self.text()}"

    def presses_ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def ends(self, within_s: float = 60) -> int:
        try:
            return self.process.wait(within_s)
        finally:
            self.process.kill()
            self._reader.join()
            os.close(self._ours)

    def text(self) -> str:
        return "\n".join(self.screen.lines())

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:  # the last one on the other side has left
                return
            with self._changed:
                self.screen.show(decoder.decode(data))
                self._changed.notify_all()


TABLE = """
from orchestrator.views import console, following
from orchestrator.jobs.live import Notice
from orchestrator.jobs.lines import LogLine
from orchestrator.jobs.live import RunProgress, HostRow

LONG = "node-with-a-name-longer-than-anyone-wants-to-read-in-a-table-of-figures"

def events():
    yield (LogLine("a", 0, "stdout", "before"),)
    for step in range(1, 30):
        a2000 = HostRow("a2000", step, 938, 333.3, 0.3124, 0.41, 0.2)
        yield RunProgress((a2000, HostRow(LONG, 10**6 - step, 10**6, 83333.0, -1e9, None)))
        if step % 10 == 0:
            yield (LogLine("a", 0, "stdout", f"at {step} " + "x" * 70),)
            yield Notice(f"link {step}")
    END

try:
    following.print_events(events())
except ZeroDivisionError:
    console.say("error after all")
console.say("the end")
"""


@pytest.mark.parametrize(("end", "last"), [("return", []), ("1 / 0", ["error after all"])])
@pytest.mark.parametrize("width", [60, 100])
def test_a_table_stands_below_the_lines_and_stays_however_it_ends(end, last, width):
    terminal = Terminal([sys.executable, "-c", TABLE.replace("END", end)], width)
    assert terminal.ends() == 0
    shown = terminal.screen.lines()
    logs = [text for step in (10, 20) for text in wrapped(f"[a 0] at {step} " + "x" * 70, width)]
    notices = [text for text in shown if text.startswith("note: link")]
    assert notices == ["note: link 10", "note: link 20"]
    header = next(i for i, text in enumerate(shown) if text.startswith("node"))
    assert [text for text in shown[:header] if text not in notices] == ["[a 0] before", *logs]
    assert shown[header].split() == ["node", "step", "samples/s", "loss", "sync", "wait"]
    assert shown[header + 1].split() == ["a2000", "29/938", "333", "0.312", "20", "%", "41", "%"]
    assert shown[header + 2].startswith("node-")
    assert shown[header + 2].split()[1:] == ["999971/1000000", "83,333", "-1e+09", "-", "-"]
    assert shown[header + 3 :] == [*last, "the end", ""]
    assert terminal.screen.cursor


def wrapped(text: str, width: int) -> list[str]:
    return [text[at : at + width] for at in range(0, len(text), width)]


BARS = """
import os, sys, time
from orchestrator.views import console, following
from orchestrator.jobs.lines import Bars, LogLine
from orchestrator.jobs.live import RunProgress, HostRow, Silence, Standstill

def bars(*texts):
    return Bars(tuple(LogLine("a", rank, "stderr", text) for rank, text in enumerate(texts)))

def seen(name):
    while sys.argv[1:] and not os.path.exists(f"{sys.argv[1]}/{name}"):
        time.sleep(0.02)

def events():
    yield Silence(2, 3.0)
    seen("silence")
    yield bars(" 10%|#   |", " 20%|##  | [red]" + "x" * 100)
    ROW
    for step in range(3):
        yield bars(f" 3{step}%|#   |", " 40%|##  |")
    seen("bars")
    yield Standstill("still busy: rank 1 at eval.py:5")
    yield Standstill("[red]missed collective: rank 1", True)
    seen("standstill")
    yield Standstill()
    yield (LogLine("a", 0, "stderr", "100%|####|"), LogLine("a", 1, "stderr", "100%|####|"))
    yield bars()

following.print_events(events())
console.say("the end")
"""
ROW_OF_A = "yield RunProgress((HostRow('a', 5, 9, 10.0, 0.5, 0.1, 0.2),), 65.0)"


@pytest.mark.parametrize("row", ["", ROW_OF_A])
def test_bars_stand_below_the_lines_and_leave_their_last_state_alone(row):
    terminal = Terminal([sys.executable, "-c", BARS.replace("ROW", row, 1)], 60)
    assert terminal.ends() == 0
    table = ["node  step  samples/s  loss  sync  wait", "a      5/9       10.0   0.5  20 %  10 %", "running 1:05"]
    lines = ["[a 0] 100%|####|", "[a 1] 100%|####|", *(table if row else [])]
    assert [text for text in terminal.screen.lines() if text] == [*lines, "the end"]


def test_a_silence_and_bars_are_seen_while_they_last(tmp_path):
    terminal = Terminal([sys.executable, "-c", BARS.replace("ROW", ROW_OF_A, 1), str(tmp_path)], 60)
    terminal.until(r"^2 ranks are starting \(3 s\)$")
    (tmp_path / "silence").touch()
    terminal.until(r"^running 1:05\n\[a 0\] 32%\|#   \|\n\[a 1\] 40%\|##  \|$")
    assert "starting" not in terminal.text()
    (tmp_path / "bars").touch()
    terminal.until(r"^\[red\]missed collective: rank 1\nnode .*\n.*\nrunning 1:05$")
    assert "still busy" not in terminal.text()
    (tmp_path / "standstill").touch()
    assert terminal.ends() == 0
    assert "missed collective" not in terminal.text()


def test_a_table_fits_sixty_columns_and_cuts_the_name_alone():
    wide = HostRow("a-rack-with-a-long-name.example.org", 12345, 93800, 83333.0, 0.3124, 0.41, 0.2)
    with console.out.capture() as shown:
        console.out.print(progress.progress_table(RunProgress((ROW, wide)), 60), width=60)
    header, first, second = [text.rstrip() for text in re.sub(r"\x1b\[[^m]*m", "", shown.get()).splitlines()]
    assert max(map(len, (header, first, second))) <= 60
    assert first.split() == ["a2000", "120/938", "333", "0.312", "20", "%", "41", "%"]
    assert second.split()[1:] == ["12345/93800", "83,333", "0.312", "20", "%", "41", "%"]
    assert second.split()[0].endswith("…")


def test_not_even_absurd_figures_fold_a_row():
    absurd = HostRow("a2000", 10**12 - 1, 10**12, 1e300, -1e12, 1.0)
    with console.out.capture() as shown:
        console.out.print(progress.progress_table(RunProgress((absurd, ROW)), 60), width=60)
    lines = re.sub(r"\x1b\[[^m]*m", "", shown.get()).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 60


# ---- a whole run ----------------------------------------------------------------------------------------------

STEPS = """
import json, os, pathlib, time
rank = int(os.environ["RANK"])
with open(os.environ["ORCH_METRICS"], "a", buffering=1) as metrics:
    metrics.write(json.dumps({"event": "start", "schema": 1, "steps": 1000}) + "\\n")
    for step in range(1000):
        exposed = {"exposed_ms": 60.0 - 40 * rank}
        line = {"event": "step", "step": step, "samples": 32, "t_ms": 100.0, "loss": 16.0, **exposed}
        metrics.write(json.dumps(line) + "\\n")
        if step == 500:
            print("half", flush=True)
            while not pathlib.Path("go").exists():
                time.sleep(0.02)
"""


def test_a_ctrl_c_waits_until_a_table_is_drawn():
    before, drawn = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), following.ctrl_c_waits():
        signal.raise_signal(signal.SIGINT)
        drawn.append("whole")
    assert drawn
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def two_hosts(tmp_path, monkeypatch):
    """One machine as a cluster of two hosts, without SSH."""
    monkeypatch.chdir(tmp_path)
    nodes = "".join(
        f"  - {{name: {name}, host: {name}, address: 127.0.0.1, workdir: {tmp_path}/{name}}}\n" for name in "ab"
    )
    python = quick_python(tmp_path / "quick")
    defaults = f"defaults: {{transport: local, device: cpu, python: {python}}}\n"
    (tmp_path / "rack.yaml").write_text(f"cluster: rack\n{defaults}nodes:\n{nodes}")
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "steps.py").write_text(STEPS)
    assert forks.run(forks.ORCH, ["up", "rack.yaml", "--allow-local"]).returncode == 0
    yield tmp_path
    assert forks.run(forks.ORCH, ["down", "--yes", "--discard"]).returncode == 0


def test_a_run_shows_its_hosts_on_a_terminal_and_after_a_ctrl_c_on_a_pipe(two_hosts: Path):
    terminal = Terminal([*ORCH, "run", "--", "steps/steps.py"], 60)
    terminal.until(r"^a +501/1000 +320 +0.5 +20 % +40 %$")
    terminal.until(r"^b +501/1000 +320 +0.5 +20 % +0 %$")
    terminal.until(r"^running \d+:\d\d, about 0:50 left$")
    terminal.presses_ctrl_c()
    terminal.until("Reattach: orch logs -f --job")
    assert terminal.ends() == 130
    shown = terminal.text()
    assert (
        shown.index("half")
        < shown.index("samples/s")
        < shown.index("501/1000")
        < shown.index("Detached; the job keeps")
    )
    assert shown.count("samples/s") == 1
    assert terminal.screen.cursor

    for job in two_hosts.glob("[ab]/jobs/*/src"):
        (job / "go").touch()
    logs = forks.run(forks.ORCH, ["logs", "-f", "--job", "latest"])
    assert logs.returncode == 0, logs.stderr
    assert sorted(logs.stdout.splitlines()) == ["[a 0] half", "[b 1] half"]
    shown = [line for line in logs.stderr.splitlines() if not line.startswith("note: ")]
    *_, of_a, of_b, outcome, following_step = shown
    assert of_a == "a: step 1000/1000, 320 samples/s, loss 0.5, sync 20 %, wait 40 %"
    assert of_b == "b: step 1000/1000, 320 samples/s, loss 0.5, sync 20 %, wait 0 %"
    job = outcome.removeprefix("succeeded ")
    assert following_step == f"next: orch collect --job {job}"
    now = forks.run(forks.ORCH, ["logs", "--job", "latest"])
    assert now.stderr == ""
