"""What each block of a network takes alone: sizes, stretches, lines, and passes through a real network."""

from __future__ import annotations

import contextlib
import gc
import weakref
from unittest import mock

import pytest
import torch
from torchvision.models.resnet import BasicBlock, ResNet

from tests.support.cpu_graphs import CpuGraph, cpu_graphs
from trainer.compute.arithmetic import Full
from trainer.compute.models import stages_of
from trainer.compute.timer import CpuTimer
from trainer.measure import Lap, NoMemory, Passes, Subject, micro_batches, stretches, time_blocks
from trainer.pipeline import Block
from trainer.shared import DATA_SETS
from trainer.strategies import local_loss

NOISE_MS = 0.01


def block(work=0.25, kernels=0.25):
    return Block(behind=(1,), work=work, kernels=kernels, weight_bytes=0, buffer_bytes=0, activation_bytes=0)


class Host:
    """Takes passes of a known length on a clock of its own. lines: fixed_ms and sample_ms of forward of each block;
    backward takes twice that, weights three times.
    """

    def __init__(self, lines, room=10**9):
        self.lines, self.room, self.now_s, self.taken = lines, room, 0.0, []

    def take(self, samples, cut):
        if samples > self.room:
            raise NoMemory
        self.taken.append((samples, cut))
        single = [fixed_ms + sample_ms * samples for fixed_ms, sample_ms in self.lines]
        self.now_s += 6 * sum(single) / 1000
        ends = (*cut[1:], len(single))
        stretched = [sum(single[first:end]) for first, end in zip(cut, ends, strict=True)]
        return [Lap(ms, 2 * ms, 3 * ms) for ms in stretched]

    def time(self, blocks, sizes=(8, 16, 64), budget_s=3.0):
        return time_blocks(self.take, blocks, sizes, NOISE_MS, budget_s, now=lambda: self.now_s)


def test_each_block_and_task_has_its_own_line():
    lines = [(1.0, 0.5), (0.25, 2.0), (3.0, 0.125), (0.5, 0.5)]
    found = Host(lines).time([block()] * 4)
    for task, times in ((found.forward, 1), (found.backward, 2), (found.weights, 3)):
        assert task == tuple(pytest.approx((times * fixed, times * sample)) for fixed, sample in lines)
    assert (found.samples, found.stretches) == ((8, 16, 64), 4)
    whole_ms = 6 * sum(fixed + 64 * sample for fixed, sample in lines)
    assert found.record(64, whole_ms / 1.25)["of_whole"] == 1.25
    assert found.record(128, whole_ms)["of_whole"] is None, "the whole network was timed with another size"


def test_blocks_that_the_clock_cannot_tell_share_a_stretch_by_their_work():
    blocks = [block(0.4, 0.5), block(0.05, 0.2), block(0.15, 0.2), block(0.4, 0.1)]
    host = Host([(1.0, 1.0), (0.01, 0.001), (0.03, 0.004), (1.0, 1.0)])
    found = host.time(blocks)
    assert host.taken[-1] == (64, (0, 1))
    assert found.stretches == 2
    assert found.forward[0] == pytest.approx((1.0, 1.0))
    fixed_ms, sample_ms = 1.04, 1.005
    assert found.forward[1] == pytest.approx((0.4 * fixed_ms, 0.05 / 0.6 * sample_ms))
    assert [sum(line) for line in zip(*found.forward, strict=True)] == pytest.approx([1 + fixed_ms, 1 + sample_ms])


@pytest.mark.parametrize(
    ("forward_ms", "cut"),
    [([1, 1, 1], (0, 1, 2)), ([0.04, 0.04, 0.04], (0,)), ([1, 0.04, 0.07], (0, 1)), ([0.04, 1, 0.04], (0,))],
)
def test_stretches_are_as_short_as_the_clock_allows(forward_ms, cut):
    laps = [Lap(ms, 1.0, 1.0) for ms in forward_ms]
    assert stretches(laps, 10 * NOISE_MS) == cut
    assert stretches(laps, 0.0) == (0, 1, 2), "a clock without any noise"


def test_micro_batches_lie_between_the_smallest_of_a_plan_and_a_quarter_of_the_batch():
    quick = {2**power: 1.0 for power in range(1, 12)}
    assert micro_batches(quick, 256, 3) == (8, 32, 64)
    assert micro_batches(quick, 2048, 3) == (8, 64, 512)
    assert micro_batches({2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}, 16, 3) == (2, 4, 8)
    assert micro_batches({2: 1.0, 4: 2.0}, 256, 3) == (2, 4)


def test_a_slow_host_takes_two_small_sizes():
    slow = {2**power: 100.0 * 2**power for power in range(1, 9)}
    assert micro_batches(slow, 256, 12) == (8, 16)
    assert micro_batches(slow, 256, 3) == micro_batches(slow, 256, 0.1) == (2, 4)
    host = Host([(0, 500.0)] * 4)
    assert host.time([block()] * 4, sizes=(8, 16), budget_s=0.1).samples == (8, 16)
    assert len(host.taken) == 1 + 2 + 1 + 2


def test_the_time_is_kept():
    host = Host([(0.1, 0.02)] * 4)
    host.time([block()] * 4, budget_s=0.3)
    assert 0.3 < host.now_s < 0.45


def test_sizes_that_find_no_memory_are_left_out():
    assert Host([(1.0, 0.5)] * 2, room=32).time([block()] * 2).samples == (8, 16)
    assert Host([(1.0, 0.5)] * 2, room=8).time([block()] * 2) is None


# ---- a real network -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replays", [False, True])
def test_passes_through_blocks_give_the_gradients_of_the_whole_network(replays):
    with cpu_graphs():
        take_passes(replays)
        assert bool(CpuGraph.replays) is replays


@contextlib.contextmanager
def without_collector():
    gc.disable()
    try:
        with mock.patch.object(gc, "collect"):
            yield
    finally:
        gc.enable()


def take_passes(replays):
    torch.manual_seed(0)
    model, device = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10), torch.device("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    facts = DATA_SETS["cifar10"]
    subject = Subject(model, optimizer, Full(), facts, device, CpuTimer(), None, torch.empty(0))
    torch.manual_seed(1)
    images, labels = subject.batch(4)
    (local_loss(model, images, labels) / 4).backward()
    whole = [weight.grad for weight in model.parameters()]
    passes, before = Passes(subject, replays=replays), lambda: None
    for cut in ((0, 1, 2, 3, 4, 5), (0, 4)):
        with without_collector():
            passes.take(4, cut)
            assert before() is None, "holds memory that the next sizes need"
        before = weakref.ref(passes.stages[0].graphs) if replays else before
        torch.manual_seed(1)
        optimizer.zero_grad(set_to_none=True)
        laps = passes.take(4, cut)
        assert len(laps) == len(cut)
        assert all(lap.forward_ms > 0 and lap.backward_ms > 0 and lap.weights_ms > 0 for lap in laps)
        for weight, expected in zip(model.parameters(), whole, strict=True):
            torch.testing.assert_close(weight.grad, expected)
    assert 0 <= passes.noise_ms() < 1
    found = time_blocks(passes.take, [block(1 / 6, 1 / 6)] * len(stages_of(model)), (2, 4), passes.noise_ms(), 0.01)
    assert len(found.forward) == 6
    assert found.largest_ms > 0
