"""A stand-in keeps a GPU's deadlines: by a clock of the test's own, and over real Gloo."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.free_port import free_port

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
import torch.multiprocessing as mp

from trainer.compute.models import build_model
from trainer.compute.timer import CpuTimer
from trainer.data import BlankBatches, RankBatches, SampleStream
from trainer.paced import Anatomy, StandIn, StandInExecutor, StandInOptimizer, Stopwatch, dissect, memory_needed
from trainer.ranks import RankInfo, join
from trainer.ranks.process_group import leave
from trainer.shared import DATA_SETS, MetricsWriter, Pace, TrainError, Work, gpu_work, parse_settings
from trainer.shared.pace import BACKWARD, FORWARD, OPTIMISER
from trainer.strategies import build_strategy, local_loss

SHAPE = (1, 28, 28)
STEP_S = 0.5
PACE = Pace(samples_per_s=100, fixed_ms=100)  # 40 samples take STEP_S
IMAGES = torch.zeros(40, *SHAPE)
LABELS = torch.zeros(40, dtype=torch.long)


class TestsOwnClock:
    """Only sleeping takes time, and what a test adds."""

    __test__ = False

    def __init__(self) -> None:
        self.time_s = 1000.0

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.time_s += seconds


class Step:
    """One network after the other through its steps, by the test's own clock; times count from a step's begin."""

    def __init__(self, pace: Pace = PACE) -> None:
        self.anatomy = dissect("lenet", SHAPE, 10)
        self.clock = TestsOwnClock()
        self.stopwatch = Stopwatch(pace, clock=self.clock)
        self.model = StandIn(self.anatomy, self.stopwatch, 10)
        self.optimizer = StandInOptimizer(self.model)
        self.released_s: dict[int, float] = {}
        self.forward_s = self.backward_s = self.whole_s = 0.0
        self.began_s = 0.0
        self.cpu_work: Callable[[int], None] = lambda index: None
        for index, parameter in enumerate(self.model.parameters()):
            parameter.register_hook(lambda gradient, index=index: self._release(index))

    def _release(self, index: int) -> None:
        self.released_s[index] = self.clock.now() - self.began_s
        self.cpu_work(index)

    def take(self, before_backward: Callable[[], None] = lambda: None) -> None:
        self.released_s.clear()
        self.began_s = self.clock.now()
        self.optimizer.zero_grad()
        loss = local_loss(self.model, IMAGES, LABELS)
        self.forward_s = self.clock.now() - self.began_s
        before_backward()
        loss.backward()
        self.backward_s = self.clock.now() - self.began_s
        self.optimizer.step()
        self.whole_s = self.clock.now() - self.began_s


def deadlines_s(anatomy: Anatomy) -> dict[int, float]:
    """By parameter: forward, then backward over all later layers and its own."""
    works = [layer.work for layer in anatomy.layers]
    return {
        index: STEP_S * (FORWARD + BACKWARD * sum(works[number:]))
        for number, layer in enumerate(anatomy.layers)
        for index in layer.parameters
    }


# ---- deadlines ----------------------------------------------------------------------------------------------------


def test_every_layer_is_released_at_its_deadline_from_the_last_to_the_first() -> None:
    step = Step()
    for _ in range(2):
        step.take()
        assert step.forward_s == pytest.approx(FORWARD * STEP_S)
        assert step.released_s == pytest.approx(deadlines_s(step.anatomy))
        layers = [
            next(k for k, layer in enumerate(step.anatomy.layers) if i in layer.parameters) for i in step.released_s
        ]
        assert layers == sorted(layers, reverse=True)
        assert len(step.released_s) == 10
        assert step.backward_s == pytest.approx((FORWARD + BACKWARD) * STEP_S)
        assert step.whole_s == pytest.approx(STEP_S)
    assert step.stopwatch.lateness == pytest.approx([0, 0], abs=1e-9)


def test_what_the_cpu_works_lies_within_the_step_and_not_on_top_of_it() -> None:
    step = Step()
    step.cpu_work = lambda index: step.clock.sleep(0.3 * STEP_S) if index == 7 else None  # the last layer but one
    step.take()
    due_s = deadlines_s(step.anatomy)
    assert all(step.released_s[index] >= due_s[index] - 1e-9 for index in due_s)
    assert step.released_s[4] > due_s[4] + 0.05
    assert step.released_s[0] == pytest.approx(due_s[0])
    assert step.whole_s == pytest.approx(STEP_S)
    assert step.stopwatch.lateness == pytest.approx([0], abs=1e-9)


def test_the_update_takes_its_part_from_when_all_gradients_are_there() -> None:
    step = Step()
    step.take()
    step.clock.sleep(3.0)  # the others come late
    before_s = step.clock.now()
    step.optimizer.step()
    assert step.clock.now() - before_s == pytest.approx(OPTIMISER * STEP_S)


def test_a_pause_made_on_purpose_lengthens_the_step_and_is_not_late() -> None:
    step = Step()

    def pause() -> None:
        step.clock.sleep(0.05)
        step.stopwatch.postpone(0.05)

    step.take(before_backward=pause)
    assert step.released_s == pytest.approx({index: due + 0.05 for index, due in deadlines_s(step.anatomy).items()})
    assert step.whole_s == pytest.approx(STEP_S + 0.05)
    assert step.stopwatch.lateness == pytest.approx([0], abs=1e-9)


def test_a_slowdown_comes_at_its_step() -> None:
    step = Step(Pace(samples_per_s=100, fixed_ms=100, slowdown=((2, 3.0),)))
    lengths = []
    for _ in range(4):
        step.take()
        lengths.append(step.whole_s)
    assert lengths == pytest.approx([STEP_S, STEP_S, 3 * STEP_S, 3 * STEP_S])


# ---- lateness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("late", "valid"), [(0.0, True), (0.009, True), (0.011, False), (4.0, False)])
def test_a_rank_is_valid_as_long_as_its_cpu_keeps_up(tmp_path: Path, late: float, valid: bool) -> None:
    """The CPU is busy with the second layer's gradients until after the first one's deadline."""
    step = Step()
    end_s = (FORWARD + BACKWARD + late) * STEP_S

    def work(index: int) -> None:
        if index == 2:
            step.clock.time_s = step.began_s + end_s

    step.cpu_work = work
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.lateness = lambda: step.stopwatch.median_lateness(0)
    step.take()
    metrics.end("succeeded")
    end = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert end["lateness"] == pytest.approx(late, abs=1e-9)
    assert end["valid"] is valid


def test_lateness_is_the_median_after_the_warm_up() -> None:
    stopwatch = Stopwatch(PACE, clock=TestsOwnClock())
    assert stopwatch.median_lateness(3) is None
    stopwatch.lateness = [9.0, 9.0, 9.0, 0.0, 0.1, 5.0]
    assert stopwatch.median_lateness(3) == 0.1
    assert stopwatch.median_lateness(6) == pytest.approx(7.0)  # nothing but warm-up: better than no word


# ---- what a GPU does beside its steps ------------------------------------------------------------------------------


def test_work_beside_a_step_takes_a_gpus_time_and_is_not_done() -> None:
    step = Step(Pace(samples_per_s=100, fixed_ms=100, gb_per_s=288))
    worker, done = StandInExecutor(step.stopwatch), list[str]()
    step.take()
    before_s = step.clock.now()
    worker(gpu_work.leave(232_657_192), lambda: done.append("moved"))
    assert step.clock.now() - before_s == pytest.approx(7 * 232_657_192 / (0.9 * 288e9))
    assert done == [] and step.stopwatch.lateness == pytest.approx([0], abs=1e-9)


def test_short_work_is_made_up_for_with_what_follows() -> None:
    step = Step()
    step.take()
    worker, before_s = StandInExecutor(step.stopwatch), step.clock.now()
    for _ in range(10):
        worker(Work(0, kernels=20), lambda: None)  # 0.2 ms each
    assert step.clock.now() - before_s == pytest.approx(0.0018)
    worker(Work(0, kernels=20), lambda: None)
    assert step.clock.now() - before_s == pytest.approx(0.0018)


def test_what_the_cpu_is_late_with_work_beside_a_step_counts_as_late() -> None:
    step = Step()
    step.take()
    asleep = step.clock.sleep
    step.clock.sleep = lambda seconds: asleep(seconds + 0.02)  # others have the CPU
    StandInExecutor(step.stopwatch)(Work(0, kernels=1000), lambda: None)
    assert step.stopwatch.lateness == pytest.approx([0.02 / STEP_S])


def test_a_threads_work_has_a_time_line_of_its_own() -> None:
    step = Step()
    step.take()
    worker = StandInExecutor(step.stopwatch)
    worker(Work(0, kernels=1000), lambda: None)
    before_s = step.clock.now()
    beside = worker.beside()
    beside(Work(0, kernels=500), lambda: None)
    assert step.clock.now() - before_s == pytest.approx(0.005)
    assert step.stopwatch.lateness == pytest.approx([0], abs=1e-9)


# ---- what is real, what is not ------------------------------------------------------------------------------------


def test_every_parameter_gets_a_gradient_of_the_real_shape() -> None:
    step = Step()
    step.take()
    real = build_model("lenet", SHAPE, 10)
    assert [p.grad.shape for p in step.model.parameters()] == [p.shape for p in real.parameters()]
    assert all(torch.isfinite(parameter.grad).all() and parameter.grad.any() for parameter in step.model.parameters())


def test_parameters_and_buffers_lie_in_the_networks_own_order() -> None:
    anatomy = dissect("resnet152", (3, 32, 32), 10)
    model = StandIn(anatomy, Stopwatch(PACE, clock=TestsOwnClock()), 10)
    assert [(p.shape, p.dtype) for p in model.parameters()] == [(p.shape, p.dtype) for p in anatomy.model.parameters()]
    assert [(b.shape, b.dtype) for b in model.buffers()] == [(b.shape, b.dtype) for b in anatomy.model.buffers()]


def test_the_optimiser_leaves_the_weights_alone_and_frees_the_gradients() -> None:
    step = Step()
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step.take()
    step.take()
    assert all(torch.equal(old, new) for old, new in zip(before, step.model.parameters(), strict=True))
    step.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_blank_batches_are_as_large_as_the_ranks_shares() -> None:
    stream = SampleStream(size=203, batch=64, shares=(40, 24), seed=0)
    batches = list(BlankBatches(RankBatches(stream, 1), DATA_SETS["mnist"]))
    assert [len(images) for images, _ in batches] == [len(stream.indices(0, step, 1)) for step in range(4)]
    assert all(images.shape[1:] == SHAPE and len(images) == len(labels) for images, labels in batches)


def test_a_batch_that_the_gpu_could_not_hold_is_refused_with_the_largest_that_fits() -> None:
    anatomy = dissect("lenet", SHAPE, 10)
    gpu = Pace(100, memory_bytes=anatomy.state_bytes + 11 * anatomy.activation_bytes - 1)
    assert memory_needed(anatomy, gpu, 10) == anatomy.state_bytes + 10 * anatomy.activation_bytes
    with pytest.raises(TrainError, match=r"out of memory: 11 samples take .* at most 10 samples fit"):
        memory_needed(anatomy, gpu, 11)
    with pytest.raises(TrainError, match="at most 0 samples fit"):
        memory_needed(anatomy, Pace(100, memory_bytes=1000), 1)
    assert memory_needed(anatomy, PACE, 10**6) > 10**6


# ---- over real Gloo -----------------------------------------------------------------------------------------------


def run_rank(rank: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=(Path(folder) / "port").read_text())
    torch.set_num_threads(1)
    group = join(RankInfo(rank, rank, 2, 2, "vm", f"node{rank}", None, "127.0.0.1"), "auto", torch.device("cpu"))
    model = StandIn(dissect("lenet", SHAPE, 10), Stopwatch(Pace(samples_per_s=200)), 10)
    timer = CpuTimer()
    strategy = build_strategy(parse_settings("mnist_lenet", {"bucket_mib": "0.01"}), model, group, timer)
    optimizer = StandInOptimizer(model)
    result: dict[str, Any] = {}
    for _ in range(3):
        began = timer.mark()
        optimizer.zero_grad()  # from here on the stand-in's own time counts
        exchange = strategy.backward(local_loss(strategy.model, IMAGES, LABELS), len(LABELS), 2 * len(LABELS))
        result["collectives_ms"] = [[timer.ms(began, mark) for mark in span] for span in exchange.collectives]
        result["computed_ms"] = timer.ms(began, exchange.computed)
    # Each rank's gradient is its weights' own copy, and what travels is added up.
    result["equal"] = all(torch.allclose(parameter.grad, 2 * parameter) for parameter in model.parameters())
    result["weights"] = float(sum(parameter.detach().double().sum() for parameter in model.parameters()))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    leave()


def test_ddps_hooks_fire_during_a_stand_ins_backward_and_real_gradients_travel(tmp_path: Path) -> None:
    (tmp_path / "port").write_text(str(free_port()))
    mp.start_processes(run_rank, args=(str(tmp_path),), nprocs=2, start_method="forkserver")
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert results[0]["weights"] == results[1]["weights"]  # rank 0's, given to all
    for result in results:
        assert result["equal"]
        assert len(result["collectives_ms"]) > 1
        assert result["computed_ms"] >= 0.99 * 200  # 40 samples at 200 a second
        handed_over = [first for first, _ in result["collectives_ms"]]
        # LeNet's first layer takes 0.28 of backward: all others are handed over before it begins.
        assert min(handed_over) < result["computed_ms"] - 0.2 * BACKWARD * 200
        assert min(last for _, last in result["collectives_ms"]) < result["computed_ms"]
