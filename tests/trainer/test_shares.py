"""Shares and the sample stream: nothing lost, nothing twice, the same samples however a batch is split."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.shared import equal_shares, micro_batch_sizes, scale_shares, without_singles

pytest.importorskip("torch")
from trainer.data import RankBatches, SampleStream, derive_seed

shares_lists = st.lists(st.integers(0, 200), min_size=1, max_size=9).filter(sum)


@given(batch=st.integers(0, 10_000), world_size=st.integers(1, 64))
def test_equal_shares_add_up_and_differ_by_one_at_most(batch: int, world_size: int) -> None:
    shares = equal_shares(batch, world_size)
    assert len(shares) == world_size
    assert sum(shares) == batch
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


@given(share=st.integers(0, 5_000), count=st.integers(1, 400), part=st.floats(0, 1, exclude_max=True))
def test_the_first_micro_batch_is_smaller_by_the_part_and_the_others_are_equal(
    share: int, count: int, part: float
) -> None:
    first, *others = sizes = micro_batch_sizes(share, count, part)
    assert len(sizes) == count
    assert sum(sizes) == share
    if not part or not others:
        assert sizes == equal_shares(share, count)
        return
    assert max(others) - min(others) <= 1
    assert first <= min(others)
    assert first >= min(2, share // count)
    if 2 < first < share // count:
        assert abs(first - (1 - part) * sum(others) / len(others)) <= 1


@given(shares=shares_lists, batch=st.integers(0, 5_000))
def test_scaled_shares_add_up_and_stay_within_one_sample_of_their_exact_part(shares: list[int], batch: int) -> None:
    scaled = scale_shares(shares, batch)
    assert sum(scaled) == batch
    for share, part in zip(shares, scaled, strict=True):
        assert abs(part - Fraction(share * batch, sum(shares))) < 1
        assert share > 0 or part == 0


@given(shares=shares_lists)
def test_a_full_batch_is_not_rescaled(shares: list[int]) -> None:
    assert scale_shares(shares, sum(shares)) == tuple(shares)


@given(shares=st.lists(st.integers(0, 3) | st.integers(0, 200), max_size=12))
def test_no_rank_keeps_a_single_sample_and_none_is_lost(shares: list[int]) -> None:
    left = without_singles(shares)
    assert sum(left) == sum(shares)
    assert 1 not in left or sum(shares) == 1
    assert all(after == 0 for before, after in zip(shares, left, strict=True) if before == 0)
    assert all(after >= before for before, after in zip(shares, left, strict=True) if before != 1)


@pytest.mark.parametrize(
    ("shares", "left"),
    [
        ((1,) * 8, (2, 0) * 4),
        ((1,) * 5, (3, 0, 2, 0, 0)),
        ((1, 0, 9, 1, 9), (2, 0, 9, 0, 9)),
        ((2, 1, 9, 9), (2, 0, 10, 9)),
        ((1,), (1,)),
        ((0, 1), (0, 1)),
    ],
)
def test_singles_are_put_together_and_pile_up_on_no_rank(shares: tuple[int, ...], left: tuple[int, ...]) -> None:
    assert without_singles(shares) == left


@given(size=st.integers(1, 300), shares=st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(sum))
def test_every_sample_is_used_once_an_epoch_whatever_the_split(size: int, shares: list[int]) -> None:
    split = SampleStream(size, sum(shares), shares, seed=3)
    alone = SampleStream(size, sum(shares), [sum(shares)], seed=3)
    seen = []
    for step in range(split.steps):
        parts = [split.indices(1, step, rank) for rank in range(len(shares))]
        assert [len(part) for part in parts] == list(split.shares_at(step))
        together = [index for part in parts for index in part]
        assert together == alone.indices(1, step, 0)
        assert len(together) == split.batch_at(step) > 0
        seen += together
    assert sorted(seen) == list(range(size))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    stream = SampleStream(1000, 10, (10,), seed=1)
    assert stream.permutation(0) == SampleStream(1000, 64, (40, 24), seed=1).permutation(0)
    orders = [SampleStream(1000, 10, (10,), seed).permutation(epoch) for seed in (1, 2, 2**40) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 6


def test_seeds_fit_the_32_bits_that_torch_heeds() -> None:
    seeds = {derive_seed("order", seed, epoch) for seed in range(30) for epoch in range(30)}
    assert len(seeds) == 900
    assert max(seeds) < 2**32


def test_a_batch_sampler_gives_a_rank_its_own_part_of_each_step() -> None:
    stream = SampleStream(size=13, batch=5, shares=(3, 2, 0), seed=0)
    batches = RankBatches(stream, rank=1)
    batches.epoch = 2
    assert len(batches) == 3
    assert list(batches) == [[(2, index) for index in stream.indices(2, step, 1)] for step in range(3)]
    assert list(RankBatches(stream, rank=2)) == [[], [], []]
