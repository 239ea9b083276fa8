"""The metrics file: one strict JSON object a line, each event with exactly its documented fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer import records
from trainer.errors import TrainError
from trainer.records import EVENT_FIELDS, MetricsWriter

STEP: dict[str, Any] = dict.fromkeys(EVENT_FIELDS["step"], 1)


def lines_of(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.write("step", **STEP)
    assert lines_of(tmp_path / "metrics.jsonl") == [{"event": "step", **STEP}]


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
def test_a_full_disk_is_told_in_one_line() -> None:
    metrics = MetricsWriter(Path("/dev/full"))
    with pytest.raises(TrainError, match="No space left"):
        metrics.write("step", **STEP)
    metrics.end("failed")


def test_the_table_in_the_docstring_names_every_field_and_no_other() -> None:
    table: dict[str, set[str]] = {}
    for line in (records.__doc__ or "").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and cells[1] in EVENT_FIELDS:
            table.setdefault(cells[1], set()).update(name.strip() for name in cells[2].split(","))
    assert table == {event: set(fields) for event, fields in EVENT_FIELDS.items()}
