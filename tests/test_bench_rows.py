"""What the benchmarks' tables count, and until when a row is good enough."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "bench"))

from model import MOST, last_true
from rows import RankReport, Row, steps_in_all


def report(block: int = 0, rank: int = 0, **fields) -> RankReport:
    columns = {"t_ms": [900.0, 100.0, 100.0], "late_s": [0.5, 0.0, 0.0], "samples": [10, 10, 10], **fields}
    more = {"compute_ms": [], "exposed_ms": [], "block_s": 1.0, "busy": 0.5, "counts_from": 1, "left_out": 0}
    return RankReport(row="ddp", block=block, rank=rank, **{**more, **columns})


def test_first_steps_count_neither_for_speed_nor_as_late():
    row = Row("ddp", {}, [report()])
    assert row.samples_per_s == pytest.approx(100)
    assert (row.late, row.valid) == (0, True)


def test_the_last_late_step_does_not_count_because_it_takes_no_forward_pass_of_a_next_one():
    row = Row("late", {}, [report(t_ms=[900.0, 100.0, 100.0, 50.0], samples=[10] * 4, left_out=1)])
    assert row.samples_per_s == pytest.approx(100)


@pytest.mark.parametrize(
    ("fields", "valid"),
    [
        ({"late_s": [0.0, 0.0009, 0.0009]}, True),
        ({"late_s": [0.0, 0.0, 0.003]}, False),  # of 0.2 s
        ({"late_s": [0.0, 0.0, 0.0, 0.0, 0.0, 0.003]}, True),  # two micro-batches a step
        ({"busy": 0.91}, False),
        ({"t_ms": [], "late_s": [], "samples": []}, True),  # a row without metrics
    ],
)
def test_a_row_is_valid_where_the_cpu_was_not_the_limit(fields, valid):
    assert Row("ddp", {}, [report(**fields)]).valid is valid


def test_what_keeps_the_cores_busy_is_seen_as_late_where_ranks_train_alone():
    assert Row("alone 128", {"strategy": "none"}, [report(busy=1.0)]).valid
    assert not Row("alone 128", {"strategy": "none"}, [report(busy=1.0, late_s=[0.0, 0.1, 0.1])]).valid


def test_the_latest_rank_judges_and_one_bad_block_does_not():
    late = {"late_s": [0.0, 0.1, 0.1]}
    assert not Row("ddp", {}, [report(rank=0), report(rank=1, **late)]).valid
    assert Row("ddp", {}, [report(block=0), report(block=1, **late), report(block=2)]).valid


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 5 + 2),
        ({"steps": 3}, 3 + 2),
        ({"steps": 3, "fidelity": "late"}, 3 + 2 + 1),
        ({"fidelity": "local", "local_steps": 8, "local_overlap": 2}, 2 * 8 + 2),
        ({"fidelity": "local", "local_overlap": 0}, 2 * 32),
        ({"fidelity": "local", "steps": 3}, 2 * 32 + 8),
    ],
)
def test_a_block_ends_with_the_arrival_of_its_second_average(settings, steps):
    assert steps_in_all(settings, 5) == steps


def test_until_what_speed_a_row_is_good_enough():
    assert last_true(lambda times: times <= 3) == pytest.approx(3, rel=0.01)
    assert last_true(lambda times: True) == MOST
    assert last_true(lambda times: False) is None
