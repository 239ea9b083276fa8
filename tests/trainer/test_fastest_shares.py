"""The solver of shares: no split of whole samples is faster, whatever the ranks' speeds, fixed costs and memory."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.shared import Speed, fastest_shares

SPEEDS = st.builds(
    Speed,
    fixed_ms=st.sampled_from([0.0, 0.3, 1.0, 4.0, 30.0]),
    sample_ms=st.floats(0.1, 20),
    cap=st.none() | st.integers(0, 6),
)


def slowest_ms(speeds: list[Speed], shares: tuple[int, ...]) -> float:
    return max(speed.step_ms(share) for speed, share in zip(speeds, shares, strict=True))


@given(st.lists(SPEEDS, min_size=1, max_size=4), st.integers(0, 12))
def test_no_other_split_is_faster(speeds: list[Speed], batch: int) -> None:
    able = [speed.cap != 0 for speed in speeds]
    if not any(able):
        return
    shares = fastest_shares(speeds, batch)
    others = (
        split
        for split in product(*(range(batch + 1) if can else (0,) for can in able))
        if sum(split) == batch
    )  # fmt: skip
    assert sum(shares) == batch
    assert all(share == 0 for share, can in zip(shares, able, strict=True) if not can)
    assert slowest_ms(speeds, shares) <= min(slowest_ms(speeds, split) for split in others)


@given(st.lists(SPEEDS.filter(lambda speed: speed.cap != 0), min_size=1, max_size=40), st.integers(1, 5000))
def test_moving_a_sample_of_a_large_batch_helps_nobody(speeds: list[Speed], batch: int) -> None:
    shares = fastest_shares(speeds, batch)
    assert sum(shares) == batch and min(shares) >= 0
    whole_ms = slowest_ms(speeds, shares)
    slowest = [rank for rank, speed in enumerate(speeds) if speed.step_ms(shares[rank]) == whole_ms]
    if len(slowest) == 1:  # every other rank would be as slow, or slower, with one sample more
        others = [rank for rank in range(len(speeds)) if rank != slowest[0]]
        assert all(speeds[rank].step_ms(shares[rank] + 1) >= whole_ms for rank in others)


def test_speeds_in_proportion_give_shares_in_proportion() -> None:
    assert fastest_shares((Speed(0, 1 / 0.833), Speed(0, 1 / 0.333)), 256) == (183, 73)


def test_a_rank_that_would_only_cost_time_gets_nothing() -> None:
    assert fastest_shares((Speed(1, 1), Speed(100, 1)), 32) == (32, 0)


def test_what_goes_beyond_the_memory_is_done_in_micro_batches() -> None:
    small = Speed(fixed_ms=5, sample_ms=1, cap=8)
    assert (small.micro_batches(0), small.micro_batches(8), small.micro_batches(9)) == (0, 1, 2)
    assert small.step_ms(9) == 2 * 5 + 9
    assert fastest_shares((small,), 40) == (40,)


@pytest.mark.parametrize("speeds", [(Speed(1, 1, cap=0),), (Speed(-1, 1),), (Speed(0, 0),), (Speed(0, float("nan")),)])
def test_speeds_that_no_rank_can_have_are_refused(speeds: tuple[Speed, ...]) -> None:
    with pytest.raises(ValueError, match=r"memory|fixed_ms"):
        fastest_shares(speeds, 4)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("speeds", "batch"),
    [((Speed(2, 1), Speed(3, 2)), 10**16), ((Speed(0, 1), Speed(0, 3)), 2**62), ((Speed(9e8, 1e-8),) * 3, 64)],
)
def test_an_end_is_found_where_a_sample_is_less_than_the_spacing_of_floats(
    speeds: tuple[Speed, ...], batch: int
) -> None:
    shares = fastest_shares(speeds, batch)
    assert sum(shares) == batch
    assert min(shares) >= 0


def test_a_thousand_ranks_and_a_large_batch_take_no_time_worth_naming() -> None:
    speeds = [Speed(2 + rank % 3, 1 + rank % 7, cap=64) for rank in range(1000)]
    assert sum(fastest_shares(speeds, 100_000)) == 100_000
