"""The cost of an exchange: nccl-tests' factors, and a line that is found again in the times that it makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.shared import BUS_FACTORS, algorithm_gbps, bus_factor, fit

SIZES = [2.0**power for power in range(10, 29, 2)]
NOISE = st.lists(st.floats(-0.05, 0.05), min_size=len(SIZES), max_size=len(SIZES))


@pytest.mark.parametrize(
    ("operation", "of_two", "of_four"),
    [
        ("send_recv", 1, 1),
        ("broadcast", 1, 1),
        ("reduce", 1, 1),
        ("all_reduce", 1, 1.5),
        ("gather", 0.5, 0.75),
        ("all_gather", 0.5, 0.75),
        ("scatter", 0.5, 0.75),
        ("reduce_scatter", 0.5, 0.75),
        ("all_to_all", 0.5, 0.75),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(operation: str, of_two: float, of_four: float) -> None:
    assert (bus_factor(operation, 2), bus_factor(operation, 4)) == (of_two, of_four)


def test_every_operation_has_a_factor_that_the_test_above_knows() -> None:
    assert len(BUS_FACTORS) == 9


def test_a_gigabit_is_ten_to_the_ninth_bits() -> None:
    assert algorithm_gbps(312_500_000, 1.0) == pytest.approx(2.5)


@given(alpha_s=st.floats(1e-6, 1e-2), gbps=st.floats(0.05, 400))
def test_the_line_is_found_again_in_its_own_times(alpha_s: float, gbps: float) -> None:
    beta = 8e-9 / gbps
    line = fit([(size, alpha_s + beta * size) for size in SIZES])
    assert line is not None
    assert line.alpha_s == pytest.approx(alpha_s, rel=1e-3)
    assert line.gbps == pytest.approx(gbps, rel=1e-3)
    assert line.worst_error < 1e-6
    assert line.time_s(SIZES[3]) == pytest.approx(alpha_s + beta * SIZES[3], rel=1e-6)


@given(alpha_s=st.floats(5e-5, 5e-4), gbps=st.floats(0.5, 10), noise=NOISE)
def test_noise_of_5_percent_moves_both_ends_of_the_line_by_no_more_than_about_that(
    alpha_s: float, gbps: float, noise: list[float]
) -> None:
    """A fit of seconds would let alpha go wherever the largest sizes' noise takes it."""
    beta = 8e-9 / gbps
    times = [(alpha_s + beta * size) * (1 + part) for size, part in zip(SIZES, noise, strict=True)]
    line = fit(list(zip(SIZES, times, strict=True)))
    assert line is not None
    assert line.alpha_s == pytest.approx(alpha_s, rel=0.15)
    assert line.gbps == pytest.approx(gbps, rel=0.15)
    worst = max(abs(line.time_s(size) / time - 1) for size, time in zip(SIZES, times, strict=True))
    assert line.worst_error == pytest.approx(worst)


@given(points=st.lists(st.tuples(st.integers(1, 10**12), st.floats(1e-9, 1e9)), max_size=12))
def test_whatever_was_measured_neither_end_of_the_line_is_negative(points: list[tuple[int, float]]) -> None:
    line = fit(points)
    if line is None:
        return
    assert line.alpha_s >= 0
    assert line.slope_s >= 0
    assert line.alpha_s or line.slope_s


def test_one_size_makes_no_line() -> None:
    assert fit([]) is None
    assert fit([(1024, 0.1), (1024, 0.2)]) is None
