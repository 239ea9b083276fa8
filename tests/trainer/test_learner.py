"""A small network learns within the time of a large one: its numbers are as they would be without, the time is not."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.support.trainer_ranks import of_event, started, trained
from tests.trainer.test_standin import TestsOwnClock
from trainer.compute.models import build_model
from trainer.paced.anatomy import dissect
from trainer.paced.learner import Learner, LearnerExecutor, LearnerOptimizer
from trainer.paced.stopwatch import Stopwatch
from trainer.shared.errors import TrainError
from trainer.shared.gpu_work import Work
from trainer.shared.pace import BACKWARD, FORWARD, Pace, read_pace

SHAPE = (1, 28, 28)
WAYS = {
    "ddp": [],
    "unequal shares, flat": ["--strategy", "allreduce_flat", "--shares", "node0=5,node1=27"],
    "half": ["--fidelity", "half"],
    "local": ["--fidelity", "local", "--local_steps", "2", "--local_overlap", "0", "--local_after", "0"],
    "compressed": ["--fidelity", "compressed", "--compress_after", "3"],
    "micro-batches": ["--accumulate", "2"],
}
RUN = "--exp mnist_lenet --data synthetic --samples 320 --batch 32 --steps 8 --lr 0.01 --augment none".split()  # noqa: SIM905


def learner(clock: TestsOwnClock) -> Learner:
    torch.manual_seed(1)
    own = build_model("lenet", SHAPE, 10)
    return Learner(dissect("lenet", SHAPE, 10), Stopwatch(Pace(samples_per_s=100), clock=clock), own, 10)


def test_gradients_are_the_small_networks_and_come_when_the_large_ones_would():
    clock = TestsOwnClock()
    model, images, labels = learner(clock), torch.randn(40, *SHAPE), torch.arange(40) % 10
    own = copy.deepcopy(model.network)
    optimizer = LearnerOptimizer(model, torch.optim.SGD(model.network.parameters(), lr=0.1))
    seen: dict[str, float] = {}
    began_s = clock.now()
    for name, weight in model.named_parameters():
        weight.register_hook(lambda gradient, name=name: seen.update({name: clock.now() - began_s}))
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    cross_entropy(own(images), labels).backward()
    for weight, expected in zip(model.network.parameters(), own.parameters(), strict=True):
        assert torch.equal(weight.grad, expected.grad)
    assert all(not weight.grad.any() for weight in model.weights), "no norm of gradients changes"
    own_s = [seconds for name, seconds in seen.items() if name.startswith("network.")]
    assert own_s == [pytest.approx(0.4 * FORWARD)] * len(own_s) and len(own_s) == 10
    assert max(seen.values()) == pytest.approx(0.4 * (FORWARD + BACKWARD))
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 and all(not weight.any() for weight in model.weights)
    assert clock.now() - began_s == pytest.approx(0.4)


def test_an_evaluation_takes_no_time_of_the_pace():
    clock = TestsOwnClock()
    model, images = learner(clock), torch.randn(4, *SHAPE)
    with torch.no_grad():
        assert torch.equal(model(images), model.network(images))
    assert clock.now() == 1000.0


def test_work_on_gradients_is_done_and_takes_the_gpus_time():
    clock = TestsOwnClock()
    model, done = learner(clock), []
    model.stopwatch.begin(4)
    executor = LearnerExecutor(model.stopwatch)
    executor(Work(288e9 * 0.9), lambda: done.append(clock.now()))
    assert done == [1000.0] and clock.now() > 1000.5
    late = LearnerExecutor(model.stopwatch, is_beside=True)
    late(Work(288e9 * 0.9), lambda: clock.sleep(60.0))  # the CPU takes longer than the GPU would


@pytest.mark.parametrize("way", WAYS)
def test_paced_ranks_learn_what_others_learn(tmp_path, way):
    paces = [{"ORCH_PACED": json.dumps({"samples_per_s": speed, "like": "mnist_lenet"})} for speed in (2000, 4000)]
    words = [*RUN, *WAYS[way]]
    found = []
    for name, of_ranks in (("plain", ()), ("paced", paces)):
        (tmp_path / name).mkdir()
        first, second = trained(tmp_path / name, words, 2, of_ranks=of_ranks)
        losses = [[step["loss"] for step in of_event(rank, "step")] for rank in (first, second)]
        (judged,) = of_event(first, "eval")
        found.append((losses, judged["loss"], judged["accuracy"]))
        assert of_event(first, "start")[0]["paced"] is (name == "paced")
    (plain, paced) = found
    assert paced[0] == [pytest.approx(losses, rel=1e-4) for losses in plain[0]]
    assert paced[1:] == (pytest.approx(plain[1], rel=1e-4), pytest.approx(plain[2], abs=0.01))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategy", "pipeline"], "whole networks alone"),
        (["--checkpoint_every", "3"], "nothing that could be kept"),
    ],
)
def test_what_a_learner_cannot_do_is_refused(tmp_path, words, said):
    paces = [{"ORCH_PACED": '{"samples_per_s": 900, "like": "mnist_lenet"}'}] * 2
    with started(tmp_path, [*RUN, *words], 2, of_ranks=paces) as ranks:
        assert all(said in errors for _, errors in [rank.communicate(timeout=60) for rank in ranks])


def test_what_it_is_like_is_an_experiment():
    assert read_pace('{"samples_per_s": 3, "like": "resnet152_cifar"}').like == "resnet152_cifar"
    with pytest.raises(TrainError, match="like is one of mnist_lenet"):
        read_pace('{"samples_per_s": 3, "like": "resnet"}')
