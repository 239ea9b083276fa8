"""How running jobs go, folded from their hosts' frames for who looks at several; and how `orch top` shows it."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from orchestrator.errors import ConnectError
from orchestrator.jobs import (
    FRESH_S,
    Agent,
    FilePiece,
    Gauge,
    GaugedJob,
    HostNow,
    HostRow,
    JobNow,
    JobRecord,
    held_up_by,
)
from orchestrator.views import documents, top
from tests.jobs.test_live import plan_of

GPU = {"event": "gpu", "rank": 0, "index": 1, "utilisation": 97, "memory_bytes": 8 << 30, "watts": 69.7, "celsius": 71}


class Feed:
    """A gauge, and what its hosts say."""

    def __init__(self, state: str = "running", **ranks: int) -> None:
        self.plan = plan_of(**ranks)
        record = {"schema": 1, "id": "job-one", "state": state, "exp": "e", "cluster": "c", "nodes": tuple(ranks)}
        self.record = JobRecord.model_validate(record)
        self.gauge = Gauge(self.plan, self.record)
        self.at: dict[str, int] = {}

    def say(self, node: str, file: str, rank: int | None = None, now_s: float = 0.0, **fields: Any) -> None:
        data = json.dumps(fields).encode() + b"\n"
        offset = self.at.get(node + file, 0)
        self.at[node + file] = offset + len(data)
        self.gauge.take(node, FilePiece(file, rank, offset, data), now_s)

    def step(self, node: str, rank: int, step: int, **fields: Any) -> None:
        told = {"step": step, "samples": 10, "t_ms": 100.0, "exposed_ms": 0.0, "comm_ms": 0.0, "loss": 20.0, **fields}
        self.say(node, f"rank-{rank}/metrics.jsonl", rank, event="step", **told)

    def now(self, now_s: float = 0.0) -> JobNow:
        return self.gauge.now(90.0, now_s)


def fed() -> Feed:
    feed = Feed(a=1, b=1)
    for step in range(3):
        feed.step("a", 0, step)
        feed.step("b", 1, step, samples=30, exposed_ms=41.0, comm_ms=41.0, loss=30.0)
    return feed


def test_a_job_has_the_speed_and_the_loss_of_all_its_hosts_and_names_the_one_that_others_wait_for() -> None:
    now = fed().now()
    assert (now.step, now.samples_per_s, now.held_up_by) == (3, 400.0, ("a", 0.41))
    assert now.loss == pytest.approx((10 * 2.0 + 30 * 1.0) / 40)


def test_before_its_first_step_nothing_is_known_and_nothing_is_made_up() -> None:
    now = Feed(a=1, b=1).now()
    assert (now.step, now.steps, now.samples_per_s, now.loss, now.held_up_by) == (None, None, None, None, None)
    assert "no step yet" in shown(now, 80)


def test_each_look_adds_one_to_the_speeds() -> None:
    feed = fed()
    assert [feed.now().speeds for _ in range(2)] == [(400.0,), (400.0, 400.0)]
    assert feed.now().hosts[1].speeds == (300.0,) * 3


def test_a_gpus_newest_reading_counts_and_only_while_it_is_news() -> None:
    feed = fed()
    feed.say("a", "gpu.jsonl", **GPU, limit_watts=70)
    feed.say("a", "gpu.jsonl", now_s=2.0, **{**GPU, "utilisation": 12})
    (reading,) = feed.now(2.0).hosts[0].gpus
    assert (reading.utilisation, reading.limit_watts, reading.celsius) == (12.0, 70.0, 71.0)
    assert feed.now(2.0 + FRESH_S + 1).hosts[0].gpus == ()


@given(st.lists(st.integers(0, 120), max_size=4))
def test_a_gpu_line_may_come_in_any_pieces(cuts: list[int]) -> None:
    feed, data = Feed(a=1), json.dumps(GPU).encode() + b"\n"
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(places):
        feed.gauge.take("a", FilePiece("gpu.jsonl", None, begin, data[begin:end]), 0.0)
    assert [reading.watts for reading in feed.now().hosts[0].gpus] == [69.7]


def test_a_host_that_gives_no_answer_is_said_until_it_does() -> None:
    feed = fed()
    feed.gauge.take("b", ConnectError("b", "no route"), 0.0)
    assert [bool(host.silent) for host in feed.now().hosts] == [False, True]
    assert "no route" in shown(feed.now(), 80) and "no answer from b" in top.line(feed.now())
    feed.gauge.take("b", Agent({"state": "running"}), 1.0)
    assert not any(host.silent for host in feed.now().hosts)


@pytest.mark.parametrize(
    ("waits", "found"),
    [
        ((0.0, 0.41), ("a", 0.41)),
        ((0.09, 0.0), None),  # not worth a word
        ((0.3, 0.31), None),  # both wait: for the network, or for each other in turn
        ((0.0, None), None),
        ((0.5,), None),
    ],
)
def test_a_host_is_named_where_another_clearly_waits_for_it(waits: Any, found: Any) -> None:
    rows = [HostRow(name, 1, 2, 1.0, None, wait) for name, wait in zip("ab", waits, strict=False)]
    assert held_up_by(rows) == found


# ---- what people see ------------------------------------------------------------------------------------------


def shown(now: JobNow, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(top.board([now], width, 50))
    return console.file.getvalue()


def full() -> Feed:
    feed = Feed(**{"a": 1, "a-host-with-a-very-long-name-indeed": 1})
    feed.say("a", "rank-0/metrics.jsonl", 0, event="start", schema=1, steps=1_234_567)
    for number, name in enumerate(("a", "a-host-with-a-very-long-name-indeed")):
        for step in range(3):
            feed.step(name, number, step, samples=4_321 * (1 + number))
        feed.say(name, "gpu.jsonl", **GPU)
    return feed


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_screen_and_no_figure_is_cut(width: int) -> None:
    feed = full()
    for _ in range(300):
        feed.now()
    lines = shown(feed.now(), width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("43,210" in line for line in lines) and any("86,420" in line for line in lines)
    assert "step 3/1,234,567 129,630 samples/s loss" in " ".join(" ".join(lines).split())


def test_a_wide_screen_has_what_the_gpus_do_and_the_course_of_the_speed() -> None:
    page = shown(full().now(), 200)
    for words in ("97 %", "8.0GiB", "71 °C", "70 W", "samples/s so far", "█"):
        assert words in page


@given(count=st.integers(1, 60), height=st.integers(3, 60), width=st.integers(30, 200))
def test_of_more_jobs_than_a_screen_has_room_for_each_has_at_least_a_line_or_is_counted(
    count: int, height: int, width: int
) -> None:
    now = full().now()
    console = Console(file=io.StringIO(), width=width, color_system=None)
    jobs = [replace(now, record=now.record.model_copy(update={"id": f"job-{number:02}"})) for number in range(count)]
    console.print(top.board(jobs, width, height))
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= height or count == 1
    named = {job.record.id for job in jobs if any(job.record.id in line for line in lines)}
    if count <= height:
        assert len(named) == count
    elif width >= 60:
        assert lines[-1] == f"and {count - height + 1} more; `orch top JOB` shows one" and len(named) == height - 1


def test_the_course_of_the_whole_job_stands_beside_its_name_of_a_pipeline_too() -> None:
    feed = Feed(a=1, b=1)
    for step in range(3):
        for rank, name in enumerate("ab"):
            feed.step(name, rank, step, bubble_before_ms=1.0, bubble_behind_ms=1.0)
    feed.now()
    heading = shown(feed.now(), 80).splitlines()[0]
    assert heading.split() == ["job-one", "running", "██"]


def test_what_a_host_writes_steers_no_terminal() -> None:
    now = full().now()
    evil = HostNow("\x1b[2Jevil", now.hosts[0].row, (), (1.0,), "\x1b]0;title\x07")
    page = shown(JobNow(now.record, (evil,), (), now.progress, ("\x1b[31mred", 0.5)), 80)
    assert "\x1b" not in page and "\x07" not in page


@given(st.lists(st.none() | st.floats(0, 1e12), max_size=80), st.floats(0, 1e12), st.integers(1, 60))
def test_a_bar_for_each_value_and_no_more_than_there_is_room(values: Any, top_value: float, width: int) -> None:
    drawn = top.spark(values, max([top_value, *(value for value in values if value)]), width)
    assert len(drawn) <= width and set(drawn) <= set(top.BARS + " ")


def test_bars_stand_from_zero() -> None:
    assert top.spark([0.0, 50.0, None, 100.0], 100.0, 10) == "▁▄ █"


def test_a_line_of_json_names_its_units_and_holds_every_host() -> None:
    said = json.loads(json.dumps(documents.top_json(fed().now())))
    assert said["samples_per_s"] == 400.0 and said["slowest"] == "a" and said["schema"] == 1
    assert [(host["node"], host["wait_share"], host["gpus"]) for host in said["hosts"]] == [
        ("a", 0.0, []),
        ("b", 0.41, []),
    ]


def test_a_mistake_of_ours_in_its_thread_is_kept_for_who_looks() -> None:
    feed = fed()

    def gauged(gauge: Gauge) -> Any:
        raise RuntimeError("ours")
        yield

    one = SimpleNamespace(id="job-one", plan=feed.plan, record=feed.record, gauged=gauged)
    one.apart = lambda: contextlib.nullcontext(one)
    job = GaugedJob(one)  # type: ignore[arg-type]
    job.start()
    assert job.over.wait(10) and job.heard.is_set() and str(job.bug) == "ours" and job.error is None
    assert [host.silent for host in job.now().hosts] == ["a: RuntimeError: ours", "b: RuntimeError: ours"]
