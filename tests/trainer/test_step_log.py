"""When steps are recorded: one step late where a device runs behind the program, at once elsewhere, none lost."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
import torch

from trainer.compute.timer import CpuTimer
from trainer.pipeline import Done
from trainer.shared import MetricsWriter, Task, metrics, parse_settings
from trainer.strategies import Exchange
from trainer.training import Console, Progress, Step, StepLog, has_marks, stage_times, step_log, task_rows


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
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "WITHIN_S", 0.0)  # a line stands in the file as soon as it is written
    return SimpleNamespace(
        metrics=MetricsWriter(tmp_path / "metrics.jsonl"),
        console=SimpleNamespace(count=lambda *_: None, is_due=lambda _: False),
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


# ---- what a stage of a pipeline did ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [(0, [0, 10, 100, 1000]), (3, [3, 10, 100, 1000]), (10, [10, 100, 1000]), (40, [40, 100, 1000])],
)
def test_one_step_in_many_has_marks(warmup, expected):
    assert [number for number in range(2000) if has_marks(number, warmup)] == expected


def test_a_wait_counts_for_the_neighbour_whose_message_ended_it():
    tasks = (
        Done(Task.FORWARD, 0, begin=1.0, end=2.0, since=0.5, came_s=0.9, sent=1.9),
        Done(Task.FORWARD, 1, begin=2.0, end=3.0, since=None, came_s=1.5, sent=2.9),
        Done(Task.BACKWARD, 0, begin=5.0, end=6.0, since=3.0, came_s=4.9, sent=5.9),
        Done(Task.WEIGHTS, 0, begin=6.0, end=7.0, since=None, came_s=None, sent=None),
    )
    exchange = Exchange(8.0, tasks=tasks, wire_ms=4.0)
    assert stage_times(CpuTimer(), exchange) == {
        "bubble_before_ms": 500,
        "bubble_behind_ms": 2000,
        "wire_ms": 4,
    }
    assert set(stage_times(CpuTimer(), Exchange(8.0)).values()) == {None}


def test_rows_count_from_the_steps_begin():
    """What came from another rank has the host's time, which is compared with the device's in the end."""
    device = Device()
    device.reached_s = 100.0
    came_s = time.perf_counter()
    tasks = (Done(Task.FORWARD, 0, begin=91.0, end=92.0, since=None, came_s=came_s, sent=91.5),)
    first, *rest = task_rows(device, Exchange(95.0, tasks=tasks, wire_ms=0.0), 90.0, 96.0, 98.0)
    assert first[:4] == ["forward", 0, 1000, 2000]
    assert first[4] <= 10000 and first[5] == 1500
    assert rest == [["sum", None, 5000, 6000, None, None], ["optimiser", None, 6000, 8000, None, None]]


def test_a_line_shows_the_mean_speed_since_the_line_before(capsys):
    info = SimpleNamespace(rank=0, world_size=1, pace=None)
    console = Console(info, parse_settings("mnist_lenet", {"warmup_steps": "0"}), 10, "x")
    times = dict.fromkeys(("load_ms", "compute_ms", "exposed_ms", "optim_ms"), 1.0)
    for number, step_ms in enumerate((1000.0, 10.0, 990.0)):
        console.count(number, 100, step_ms)
        if number != 1:
            console.step(number, 0, 100, 1.0, times)
    first, second = [line for line in capsys.readouterr().out.splitlines() if "samples/s" in line]
    assert "  100 samples/s" in first and "  200 samples/s" in second  # 200 in the second that two steps took
