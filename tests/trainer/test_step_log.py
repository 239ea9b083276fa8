"""When steps are recorded: one step late where a device runs behind the program, at once elsewhere, none lost."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
import torch

from trainer.compute.timer import CpuTimer
from trainer.shared.metrics import MetricsWriter
from trainer.strategies import Exchange
from trainer.training import step_log
from trainer.training.progress import Progress
from trainer.training.step_log import Step, StepLog


class Device(CpuTimer):
    """A time line in seconds. A mark is over when the device has reached it; waiting moves the device on."""

    behind = 1

    def __init__(self):
        self.reached_s, self.waited_for = 0.0, []

    def mark(self):
        return self.reached_s

    def wait_for(self, mark):
        self.waited_for.append(mark)
        self.reached_s = max(self.reached_s, mark)

    def is_over(self, mark):
        return mark <= self.reached_s


def step(number):
    """From second `number` to the next: 0.1 of it loading, 0.5 computing, 0.2 waiting, 0.1 optimiser, 0.1 averaging."""
    at = [number + part for part in (0, 0.1, 0.6, 0.8, 0.9, 1.0)]
    exchange, loss = Exchange(at[2]), torch.tensor(float(number + 1))
    return Step(number, 0, 8, 4, loss, exchange, at[0], at[1], at[3], at[4], at[5])


@pytest.fixture
def run(tmp_path):
    return SimpleNamespace(
        metrics=MetricsWriter(tmp_path / "metrics.jsonl"),
        console=SimpleNamespace(step=lambda *_: None),
        timer=Device(),
        rebalancer=None,
        lines=lambda: [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()],
    )


def numbers(run):
    return [line["step"] for line in run.lines()]


def test_a_step_is_recorded_when_the_next_one_has_been_queued_and_the_last_one_at_the_end(run):
    progress = Progress()
    with StepLog(run, progress) as log:
        log.begin()
        log.add(step(0))
        assert (numbers(run), run.timer.waited_for) == ([], [0.0])
        log.add(step(1))
        assert (numbers(run), run.timer.waited_for, progress.loss_sum) == ([0], [0.0, 1.0], 1.0)
        log.add(step(2))
        assert numbers(run) == [0, 1]
    assert (numbers(run), progress.loss_sum) == ([0, 1, 2], 6.0)


def test_before_a_checkpoint_all_steps_are_recorded_and_all_losses_are_counted(run):
    progress = Progress()
    with StepLog(run, progress) as log:
        log.begin()
        log.add(step(0))
        log.add(step(1))
        log.flush()
        assert (numbers(run), progress.loss_sum) == ([0, 1], 3.0)


def test_the_times_are_those_of_the_steps_own_marks(run):
    with StepLog(run, Progress()) as log:
        log.begin()
        began = log.began[1]
        log.add(step(3))
    (line,) = run.lines()
    times = {name: line[name] for name in ("t_ms", "load_ms", "compute_ms", "exposed_ms", "comm_ms", "optim_ms")}
    assert times == {
        "t_ms": 1000,
        "load_ms": 100,
        "compute_ms": 500,
        "exposed_ms": 300,
        "comm_ms": 300,
        "optim_ms": 100,
    }
    assert (line["loss"], line["samples"]) == (4.0, 4)
    assert line["wall"] == pytest.approx(began + 4.0)


def test_whoever_decides_after_each_step_hears_of_it_at_once(run):
    heard = []
    run.rebalancer = SimpleNamespace(after_update=lambda *values: heard.append(values))
    with StepLog(run, Progress()) as log:
        log.begin()
        log.add(step(0))
        assert heard == [(0, 500.0, 100.0, 4)]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_epoch_keeps_what_the_device_finished_and_waits_for_nothing_else(run, error, monkeypatch):
    monkeypatch.setattr(step_log, "MOMENT_S", 0.01)
    progress = Progress()
    with pytest.raises(error), StepLog(run, progress) as log:
        log.begin()
        log.add(step(0))
        run.timer.reached_s = 1.0
        log.left.append(step(1))  # queued; the device never gets to its end
        raise error
    assert (numbers(run), run.timer.waited_for[1:], progress.loss_sum) == ([0], [1.0], 1.0)


def test_a_gpu_that_failed_does_not_hide_why(run):
    def fail(mark):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(ValueError, match="the cause"), StepLog(run, Progress()) as log:
        log.begin()
        log.add(step(0))
        run.timer.is_over = fail
        raise ValueError("the cause")
    assert run.lines() == []


def test_on_a_cpu_a_step_is_recorded_at_its_end(run):
    run.timer = CpuTimer()
    with StepLog(run, Progress()) as log:
        log.begin()
        log.add(step(0))
        assert numbers(run) == [0]
