"""Loops of many kinds, played on a clock of their own: where each step's time goes, and which samples it trained on."""

from __future__ import annotations

import itertools

import pytest

from orchestrator.remote.step_course import Course, Source

LOAD, FORWARD, BACKWARD, WIRE, OPTIM, JUDGE, PAUSE = 3, 10, 20, 5, 2, 1000, 50_000


class Loop:
    """A script's loop: each of its doings takes a known time. Times are sums of exact numbers."""

    def __init__(self) -> None:
        self.now = 0
        self.course = Course()

    def batch(self, source: Source, samples: int | None = 8, took: int = LOAD) -> None:
        """samples: None where the source is over."""
        self.course.asks(_Moment(self.now), source)
        self.now += took
        if samples is None:
            self.course.ends(_Moment(self.now), source)
        else:
            self.course.gets(_Moment(self.now), source, samples)

    def forward(self, samples: int = 8, *, called: bool = True, exchanges: bool = True) -> None:
        self.exchanges = called and exchanges
        if called:
            self.course.calls(_Moment(self.now), samples, exchanges)
        self.now += FORWARD

    def backward(self) -> None:
        self.now += BACKWARD
        computed = _Moment(self.now)
        self.now += WIRE if self.exchanges else 0
        self.course.ends_backward(_Moment(self.now), computed)

    def step(self) -> dict[str, int]:
        self.now += OPTIM
        self.taken = self.course.ends_step(_Moment(self.now))
        spent = dict.fromkeys(("load", "compute", "exposed", "optim"), 0)
        for part, begin, end in self.taken.stretches:
            spent[part] += end.at - begin.at
        return spent


class _Moment:
    def __init__(self, at: int) -> None:
        self.at = at


USUAL = {"load": LOAD, "compute": FORWARD + BACKWARD, "exposed": WIRE, "optim": OPTIM}


def test_a_plain_loop():
    loop, loader = Loop(), Source()
    for _ in range(3):
        loop.batch(loader)
        loop.forward()
        loop.backward()
        assert loop.step() == USUAL
        assert (loop.taken.samples, loop.taken.called_with, loop.taken.exchanged) == (8, 8, True)


def test_what_lies_between_two_steps_is_part_of_load():
    loop, loader = Loop(), Source()
    for pause in (0, 7):
        loop.now += pause
        loop.batch(loader)
        loop.now += 4  # to the device
        loop.forward()
        loop.backward()
        found = loop.step()
    assert found == {**USUAL, "load": 7 + LOAD + 4}


def test_without_a_loader_load_ends_where_the_network_is_called():
    loop = Loop()
    for _ in range(3):
        loop.now += LOAD
        loop.forward(samples=4)
        loop.backward()
        found = loop.step()
    assert found == USUAL
    assert (loop.taken.samples, loop.taken.called_with) == (None, 4)


def test_without_a_network_that_exchanges_all_up_to_the_last_gradient_is_compute():
    loop, loader = Loop(), Source()
    for _ in range(2):
        loop.batch(loader)
        loop.forward(called=False)
        loop.backward()
        assert loop.step() == {**USUAL, "exposed": 0}
        assert not loop.taken.exchanged


def test_accumulated_batches_are_one_step():
    loop, loader = Loop(), Source()
    for _ in range(2):
        for part in range(4):
            loop.batch(loader)
            loop.forward(exchanges=part == 3)
            loop.backward()
        found = loop.step()
        assert found == {"load": 4 * LOAD, "compute": 4 * (FORWARD + BACKWARD), "exposed": WIRE, "optim": OPTIM}
        assert loop.taken.samples == loop.taken.called_with == 32


def test_batches_that_are_fetched_ahead_count_where_they_are_trained_on():
    """As Accelerate does: one ahead, so that it knows which is the last."""
    loop, loader, seen = Loop(), Source(), []
    sizes = [8, 7, 6, None]
    loop.batch(loader, sizes[0])
    for ahead in sizes[1:]:
        loop.batch(loader, ahead)
        loop.forward()
        loop.backward()
        seen.append((loop.step(), loop.taken.samples))
    assert [samples for _, samples in seen] == [8, 7, 6]
    assert [found["load"] for found, _ in seen] == [2 * LOAD, LOAD, LOAD]


def test_several_batches_at_once_are_all_paid_for():
    """As HF's Trainer takes those of an update that accumulates."""
    loop, loader = Loop(), Source()
    for _ in range(2):
        for _ in range(3):
            loop.batch(loader)
        for part in range(3):
            loop.forward(exchanges=part == 2)
            loop.backward()
        assert loop.step()["load"] == 3 * LOAD
        assert loop.taken.samples == 24


@pytest.mark.parametrize("whole", [True, False], ids=["to its end", "broken off"])
def test_a_judgement_between_two_steps_belongs_to_none(whole):
    loop, train = Loop(), Source()
    for number in range(6):
        loop.batch(train)
        loop.forward()
        loop.backward()
        assert loop.step() == USUAL, number
        if number % 2:
            test = Source()
            for _ in range(5):
                loop.batch(test, 100)
                loop.now += JUDGE
            if whole:
                loop.batch(test, None)
            loop.now += JUDGE
        assert loop.taken.samples == 8


def test_a_judgement_before_a_batch_that_was_fetched_before_it():
    loop, train, test = Loop(), Source(), Source()
    loop.batch(train, 8)
    loop.forward()
    loop.backward()
    loop.step()
    loop.batch(train, 7)
    for samples in (100, 100, None):
        loop.batch(test, samples)
        loop.now += JUDGE
    loop.forward()
    loop.backward()
    assert loop.step() == USUAL
    assert loop.taken.samples == 7


def test_the_pause_between_two_epochs_belongs_to_no_step():
    loop = Loop()
    for _ in range(3):
        loader = Source()
        for _ in range(2):
            loop.batch(loader)
            loop.forward()
            loop.backward()
            assert loop.step() == USUAL
        loop.batch(loader, None, took=0)
        loop.now += PAUSE


def test_loaders_that_are_asked_in_turn_are_both_paid_for():
    loop, one = Loop(), Source()
    for _ in range(3):
        other = Source()  # the shorter one begins anew
        for _ in range(2):
            loop.batch(one)
            loop.batch(other)
            loop.forward()
            loop.backward()
            assert loop.step()["load"] == 2 * LOAD


def test_two_optimisers_that_take_turns_make_one_step():
    """A GAN's: the first one counts, and what the other took is part of it."""
    loop, loader = Loop(), Source()
    for number in range(3):
        loop.batch(loader)
        loop.forward()
        loop.backward()
        found = loop.step()
        if number:
            assert found == {"load": LOAD, "compute": 2 * (FORWARD + BACKWARD), "exposed": 2 * WIRE, "optim": 2 * OPTIM}
            assert loop.taken.samples == 8
        loop.forward(samples=0)
        loop.backward()
        loop.now += OPTIM
        loop.course.moves(_Moment(loop.now))


def test_the_parts_add_up_to_all_that_passed():
    loop, loader = Loop(), Source()
    begin = None
    for ahead, accumulated in itertools.product((False, True), (1, 3)):
        for _ in range(accumulated):
            loop.batch(loader)
            if ahead:
                loop.now += 1
            loop.forward()
            loop.now += 2
            loop.backward()
        loop.now += 9  # clips gradients
        found = loop.step()
        assert begin is None or sum(found.values()) == loop.now - begin
        begin = loop.now
