"""Marks on a time line: how long at least one collective was under way, and where a rank is held up."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from hypothesis import given
from hypothesis import strategies as st

from trainer.compute import timer as brakes
from trainer.compute.timer import CpuTimer, InjectedDelay, covered_ms
from trainer.shared import Slow


class Seconds(CpuTimer):
    """Marks that a test makes up; counts how often it had to wait for the device."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda span: (span[0], sum(span))), max_size=8)


@given(SPANS)
def test_milliseconds_in_at_least_one_span_are_counted_once_in_whatever_order(spans: list[tuple[int, int]]) -> None:
    counted = sum(any(first <= tick < last for first, last in spans) for tick in range(100))
    marks = [(7.0 + first / 1000, 7.0 + last / 1000) for first, last in spans]
    assert covered_ms(CpuTimer(), 7.0, marks) == pytest.approx(counted)


def test_a_collective_that_outlasts_later_ones_counts_from_its_own_begin() -> None:
    """Gloo sends with two threads, and spans come in the order of their ends."""
    assert covered_ms(CpuTimer(), 0.0, [(0.005, 0.006), (0.001, 0.010)]) == pytest.approx(9)


def test_the_brake_holds_the_named_rank_at_the_named_place_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(brakes.time, "sleep", slept.append)
    timer = Seconds()
    postponed: list[float] = []
    delay = InjectedDelay(Slow(rank=1, at="backward", ms=50), rank=1, timer=timer, postpone=postponed.append)
    assert [delay.pause(place) for place in ("start", "backward", "sync", "call")] == [0.0, 0.05, 0.0, 0.0]
    assert (slept, postponed, timer.waits) == ([0.05], [0.05], 1)
    other = InjectedDelay(Slow(rank=1, at="backward", ms=50), rank=0, timer=timer)
    assert [other.pause("backward"), InjectedDelay().pause("start")] == [0.0, 0.0]
    assert (slept, timer.waits) == ([0.05], 1)
