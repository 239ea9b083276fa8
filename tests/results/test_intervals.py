"""Ranges of a speed from the steps of its run: simulated runs, of which the true speed is known."""

from __future__ import annotations

import random

import pytest

from orchestrator.results import LEAST_STEPS, Steps, interval, ratio


def simulated(seed: int, count: int, alike: float, mean_ms: float = 100.0) -> Steps:
    """Steps that vary by 5 %; `alike` is the correlation between neighbours."""
    draw = random.Random(seed)
    now, ms = draw.gauss(0, 1), []
    for _ in range(count):
        now = alike * now + (1 - alike**2) ** 0.5 * draw.gauss(0, 1)
        ms.append(mean_ms * (1 + 0.05 * now))
    return Steps([64.0] * count, ms)


@pytest.mark.parametrize(("count", "alike"), [(40, 0.0), (400, 0.8), (200, 0.9), (1000, 0.9)])
def test_two_runs_of_the_same_thing_differ_by_nothing_in_18_of_20(count: int, alike: float) -> None:
    found = [ratio(simulated(2 * pair, count, alike), simulated(2 * pair + 1, count, alike)) for pair in range(20)]
    assert sum(each is not None and each.low <= 1 <= each.high for each in found) >= 18


def test_a_tenth_is_seen_and_its_range_holds_it() -> None:
    found = ratio(simulated(1, 200, 0.5, mean_ms=110), simulated(2, 200, 0.5, mean_ms=100))
    assert found is not None
    assert 1 < found.low < 1.1 < found.high < 1.2


def test_steps_whose_neighbours_are_alike_have_a_wider_range() -> None:
    alone, alike = (interval(simulated(3, 400, likeness)) for likeness in (0.0, 0.9))
    assert alone is not None and alike is not None
    assert alike.high - alike.low > 2 * (alone.high - alone.low)


def test_the_value_is_that_of_all_steps_and_unequal_batches_count() -> None:
    found = interval(Steps([10.0, 30.0] * 20, [10.0, 20.0] * 20))
    assert found is not None
    assert found.value == pytest.approx(1000 * 40 / 30)
    assert found.low <= found.value <= found.high


def test_steps_that_are_all_the_same_leave_no_doubt() -> None:
    same = Steps([8.0] * LEAST_STEPS, [4.0] * LEAST_STEPS)
    found = interval(same)
    assert found is not None
    assert (found.low, found.value, found.high) == pytest.approx((2000, 2000, 2000))


def test_few_steps_have_no_range() -> None:
    few, enough = (Steps([8.0] * count, [4.0] * count) for count in (LEAST_STEPS - 1, LEAST_STEPS))
    assert interval(few) is None
    assert ratio(few, enough) is None and ratio(enough, few) is None


def test_a_run_has_the_same_range_each_time() -> None:
    of = simulated(5, 50, 0.3)
    assert interval(of) == interval(of)


def test_steps_whose_samples_nobody_counts_have_no_speed() -> None:
    known, unknown = (Steps([samples] * LEAST_STEPS, [4.0] * LEAST_STEPS) for samples in (8.0, 0.0))
    assert interval(unknown) is None
    assert ratio(unknown, known) is None and ratio(known, unknown) is None
