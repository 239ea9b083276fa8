"""The metrics file: one strict JSON object a line, each event with exactly its documented fields."""

from __future__ import annotations

import errno
import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.sshd import wait_for
from trainer.shared import EVENT_FIELDS, LINE_LIMIT, MOST_TASKS, TASKS, MetricsWriter, TrainError
from trainer.shared import metrics as records

STEP: dict[str, Any] = dict.fromkeys(EVENT_FIELDS["step"], 1)


def lines_of(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.write("step", **STEP)
    assert lines_of(tmp_path / "metrics.jsonl") == [{"event": "step", **STEP}]


def test_steps_that_follow_at_once_are_written_together_though_nothing_comes_after_them(tmp_path: Path) -> None:
    """As where the next one hangs."""
    metrics, path = MetricsWriter(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    for step in range(5):
        metrics.write("step", **{**STEP, "step": step})
    wait_for(lambda: len(lines_of(path)) == 5, "all lines to be written")
    assert [line["step"] for line in lines_of(path)] == [0, 1, 2, 3, 4]
    wait_for(lambda: "metrics" not in {thread.name for thread in threading.enumerate()}, "nobody to write any more")
    metrics.write("step", **{**STEP, "step": 5})
    metrics.write("step", **{**STEP, "step": 6})
    wait_for(lambda: len(lines_of(path)) == 7, "all lines to be written")


@pytest.mark.parametrize("last", ["epoch", "end"])
def test_what_comes_after_steps_stands_after_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    monkeypatch.setattr(records, "WITHIN_S", 600.0)
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(5):
        metrics.write("step", **{**STEP, "step": step})
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 1
    metrics.write(last, **dict.fromkeys(EVENT_FIELDS[last], 1))
    metrics.end("succeeded")
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines[:5]] == [0, 1, 2, 3, 4]
    assert [line["event"] for line in lines[5:]] == {"epoch": ["epoch", "end"], "end": ["end"]}[last]


def test_what_json_cannot_hold_is_written_as_null(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.write("step", **{**STEP, "loss": float("nan"), "t_ms": float("inf"), "wall": [1.0, float("-inf")]})
    (line,) = lines_of(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["t_ms"], line["wall"]) == (None, None, [1.0, None])


def test_an_event_has_exactly_its_fields(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="step has the fields"):
        metrics.write("step", step=1)
    with pytest.raises(ValueError, match="step has the fields"):
        metrics.write("step", **STEP, colour="red")


def test_nothing_follows_the_end(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.end("interrupted", "SIGTERM")
    metrics.end("succeeded")
    metrics.write("step", **STEP)
    (line,) = lines_of(tmp_path / "metrics.jsonl")
    assert (line["event"], line["status"], line["message"]) == ("end", "interrupted", "SIGTERM")
    assert line["peak_memory_bytes"] > 1_000_000
    assert line["total_s"] >= 0


def test_a_second_writer_appends(tmp_path: Path) -> None:
    for _ in range(2):
        MetricsWriter(tmp_path / "metrics.jsonl").write("step", **STEP)
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 2


def test_no_path_writes_nothing() -> None:
    metrics = MetricsWriter(None)
    metrics.write("step", **STEP)
    metrics.end("succeeded")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"cannot write metrics to .*absent/m\.jsonl"):
        MetricsWriter(tmp_path / "absent" / "m.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_once_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = MetricsWriter(Path("/dev/full"))
    for _ in range(3):
        metrics.write("step", **STEP)
    metrics.end("succeeded")
    printed = capsys.readouterr().err
    assert printed.count("No space left") == printed.count("\n") == 1


def test_lines_that_found_no_room_are_counted_and_a_cut_one_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "WITHIN_S", 0.0)
    path = tmp_path / "metrics.jsonl"
    metrics, room = MetricsWriter(path), small_disk(monkeypatch)
    for step in range(4):
        metrics.write("step", **{**STEP, "step": step})
    assert not path.read_bytes().endswith(b"\n")
    room[0] = 10_000
    metrics.write("step", **{**STEP, "step": 4})
    metrics.end("succeeded")
    monkeypatch.undo()
    lines = lines_of(path)
    assert [line["step"] for line in lines[:-1]] == [0, 1, 4]
    assert (lines[-1]["event"], lines[-1]["dropped"]) == ("end", 2)


def test_of_steps_written_together_those_behind_a_cut_one_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "WITHIN_S", 600.0)
    path, epoch = tmp_path / "metrics.jsonl", dict.fromkeys(EVENT_FIELDS["epoch"], 1)
    metrics, room = MetricsWriter(path), small_disk(monkeypatch)
    for first in (0, 3):
        for step in range(first, first + 3):
            metrics.write("step", **{**STEP, "step": step})
        metrics.write("epoch", **epoch)
    assert not path.read_bytes().endswith(b"\n")
    room[0] = 10_000
    metrics.end("succeeded")
    monkeypatch.undo()
    lines = lines_of(path)
    assert [line["event"] for line in lines] == ["step", "step", "step", "epoch", "end"]
    assert ([line["step"] for line in lines[:3]], lines[-1]["dropped"]) == ([0, 1, 2], 4)


def test_a_step_whose_times_cannot_be_had_is_counted_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "WITHIN_S", 0.02)  # what waits is written by the writer's own thread
    metrics, path = MetricsWriter(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    fields: list[dict[str, Any]] = [{**STEP, "step": 0}, {**STEP, "step": 1}, {"step": 2}, {**STEP, "step": 3}]
    for each in fields:
        metrics.write_beside("step", partial(dict, each))
    wait_for(lambda: len(lines_of(path)) == 3, "all others to be written")
    metrics.write_beside("step", partial(dict, STEP))
    wait_for(lambda: len(lines_of(path)) == 4, "the next one to be written, too")
    metrics.end("succeeded")
    lines = lines_of(path)
    assert [line.get("step") for line in lines] == [0, 1, 3, STEP["step"], None] and lines[-1]["dropped"] == 1
    assert capsys.readouterr().err.count("step has the fields") == 1


def test_beside_training_fields_are_asked_for_by_another_thread_and_after_the_end_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "WITHIN_S", 0.5)
    metrics, asked = MetricsWriter(tmp_path / "metrics.jsonl"), list[str]()

    def fields() -> dict[str, Any]:
        asked.append(threading.current_thread().name)
        return dict(STEP)

    metrics.write_beside("step", fields)
    metrics.write_beside("step", fields)
    wait_for(lambda: len(asked) == 2, "the second line")
    metrics.end("succeeded")
    metrics.write_beside("step", fields)
    assert asked == ["MainThread", "metrics"] and len(lines_of(tmp_path / "metrics.jsonl")) == 3


def test_what_waits_is_left_to_the_thread_that_waits_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, asked = MetricsWriter(tmp_path / "metrics.jsonl"), list[int]()

    def fields(step: int) -> dict[str, Any]:
        asked.append(step)
        return {**STEP, "step": step}

    monkeypatch.setattr(records, "WITHIN_S", 600.0)  # so long the thread waits that the second line starts
    for step in range(2):
        metrics.write_beside("step", partial(fields, step))
    monkeypatch.setattr(records, "WITHIN_S", 0.0)
    metrics.write_beside("step", partial(fields, 2))
    assert asked == [0]
    metrics.end("succeeded")
    assert asked == [0, 1, 2] and len(lines_of(tmp_path / "metrics.jsonl")) == 4


def small_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Room for one line and a half, until somebody makes room: the bytes that are left."""
    whole, room = os.write, [300]

    def write(handle: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = whole(handle, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", write)
    return room


def test_the_marks_of_a_step_of_many_tasks_fit_into_a_line(tmp_path: Path) -> None:
    rows = [[max(TASKS, key=len), 99999, *[12345678.123] * 4]] * MOST_TASKS  # of a step of three hours
    MetricsWriter(tmp_path / "metrics.jsonl").write("tasks", step=10**9, tasks=rows, left_out=10**6)
    assert (tmp_path / "metrics.jsonl").stat().st_size <= LINE_LIMIT
