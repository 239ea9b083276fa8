"""Jobs packed onto unequal slots: each once, no slot twice at a time, and the end near the earliest that there is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.sweeps import makespan_s, pack

LENGTHS = st.floats(0.5, 500.0)


@st.composite
def racks(draw, most_jobs=14):
    works = draw(st.lists(LENGTHS, max_size=most_jobs))
    speeds = draw(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5))
    ready = {f"s{index}": draw(st.floats(0.0, 300.0)) for index in range(len(speeds))}
    jobs = {f"j{index}": work for index, work in enumerate(works)}
    return jobs, dict(zip(ready, speeds, strict=True)), ready


def takes_of(jobs, speeds):
    return lambda job, slot: jobs[job] / speeds[slot]


@given(racks())
def test_every_job_has_one_place_and_no_slot_has_two_jobs_at_once(rack):
    jobs, speeds, ready = rack
    placed = pack(list(jobs), ready, takes_of(jobs, speeds))
    assert sorted(each.job for each in placed) == sorted(jobs)
    for slot in ready:
        mine = [each for each in placed if each.slot == slot]
        assert all(each.start_s >= ready[slot] for each in mine)
        assert all(after.start_s == pytest.approx(before.end_s) for before, after in itertools.pairwise(mine))
        lengths = [each.end_s - each.start_s for each in mine]
        assert all(before >= after - 1e-6 for before, after in itertools.pairwise(lengths)), "longest first"


@given(racks(most_jobs=6))
def test_the_last_job_ends_at_most_a_third_later_than_in_the_best_of_all_packings(rack):
    jobs, speeds, ready = rack
    takes = takes_of(jobs, speeds)
    found = makespan_s(pack(list(jobs), ready, takes))
    assert found <= 4 / 3 * max(best_s(jobs, ready, takes), 1e-9) + 1e-6


def best_s(jobs, ready, takes):
    ends = []
    for chosen in itertools.product(ready, repeat=len(jobs)):
        loads = dict.fromkeys(chosen, 0.0)
        for job, slot in zip(jobs, chosen, strict=True):
            loads[slot] += takes(job, slot)
        ends.append(max((ready[slot] + load for slot, load in loads.items()), default=0.0))
    return min(ends)


def test_a_slot_that_would_end_later_gets_nothing():
    takes = {"fast": 10.0, "slow": 100.0}
    placed = pack(["a", "b", "c"], {"fast": 0.0, "slow": 0.0}, lambda job, slot: takes[slot])
    assert [each.slot for each in placed] == ["fast"] * 3
    assert makespan_s(placed) == 30.0


def test_a_job_that_fits_nowhere_is_left_out():
    placed = pack(["a", "b"], {"s": 0.0}, lambda job, slot: float("inf") if job == "a" else 1.0)
    assert [each.job for each in placed] == ["b"]
    assert pack(["a"], {}, lambda job, slot: 1.0) == ()


def test_an_exchange_improves_what_longest_first_alone_gives():
    works = {"a": 3.0, "b": 3.0, "c": 2.0, "d": 2.0, "e": 2.0}  # longest first ends after 7
    placed = pack(list(works), {"x": 0.0, "y": 0.0}, lambda job, slot: works[job])
    assert makespan_s(placed) == 6.0
