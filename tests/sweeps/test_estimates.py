"""How long a sweep's jobs will take, and which of them are worse than most."""

from __future__ import annotations

import pytest

from orchestrator.sweeps import Estimates, Observed, is_bad

WORK = {"short": 1_000.0, "long": 4_000.0}
SPEED = {"fast": 100.0, "slow": 25.0}


def test_known_speeds_give_seconds_and_the_first_ends_correct_them():
    estimates = Estimates(WORK, lambda job, slot: SPEED[slot])
    assert estimates.takes_s("short", "fast") == 20.0 and estimates.takes_s("long", "slow") == 170.0
    estimates.learn(Observed("short", "fast", duration_s=16.0, trained_s=12.0))
    assert estimates.takes_s("long", "fast") == pytest.approx(4.0 + 1.2 * 40.0)
    assert estimates.takes_s("short", "slow") == pytest.approx(4.0 + 1.2 * 40.0), "others are corrected alike"
    estimates.learn(Observed("short", "slow", duration_s=44.0, trained_s=40.0))
    assert estimates.takes_s("short", "slow") == pytest.approx(44.0)


def test_without_speeds_the_jobs_that_have_ended_tell_them():
    estimates = Estimates({"a": 1.0, "b": 3.0})
    assert not estimates.are_known and estimates.takes_s("b", "x") == 3 * estimates.takes_s("a", "x")
    estimates.learn(Observed("a", "x", duration_s=20.0, trained_s=None))
    estimates.learn(Observed("a", "y", duration_s=5.0, trained_s=None))
    assert (estimates.takes_s("b", "x"), estimates.takes_s("b", "y")) == (60.0, 15.0)
    assert estimates.are_known


def losses(first, last, steps=100):
    return [(step, first + (last - first) * step / steps) for step in range(0, steps + 1, 10)]


def test_a_job_is_stopped_if_its_best_is_worse_than_the_median_of_the_others_means():
    histories = {"a": losses(2, 1), "b": losses(2, 1.2), "c": losses(2, 1.4), "bad": losses(4, 3)}
    assert is_bad("bad", histories)
    assert not any(is_bad(name, histories) for name in "abc")


def test_none_is_stopped_early_or_among_few_or_ahead_of_the_others():
    good, bad = losses(2, 1), losses(4, 3)
    assert not is_bad("bad", {"a": good, "b": good, "bad": bad}), "two others are no majority"
    young = [each for each in bad if each[0] < 20]
    assert not is_bad("bad", {"a": good, "b": good, "c": good, "bad": young})
    behind = {name: losses(2, 1, 50) for name in "abc"}
    assert not is_bad("bad", {**behind, "bad": bad}), "the others have not come so far"
    assert not is_bad("none", {"a": good, "b": good, "c": good})
