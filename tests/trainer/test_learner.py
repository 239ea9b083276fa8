"""A small network learns within the time of a large one: its numbers are as they would be without, the time is not."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.support.trainer_ranks import of_event, started, trained
from tests.trainer.test_standin import TestsOwnClock
from trainer.compute.arithmetic import Full
from trainer.compute.models import build_model
from trainer.paced import Learner, LearnerExecutor, LearnerOptimizer, LearningPart, StageClock, Stopwatch, dissect
from trainer.pipeline import Layout, LearningStage, part_of, survey
from trainer.setup import chain_like, learning_cut
from trainer.shared import Pace, Stage, TrainError, Work, parse_stages, read_pace
from trainer.shared.pace import BACKWARD, FORWARD, OPTIMISER

SHAPE = (1, 28, 28)
WAYS = {
    "ddp": [],
    "unequal shares, flat": ["--strategy", "allreduce_flat", "--shares", "node0=5,node1=27"],
    "half": ["--fidelity", "half"],
    "local": ["--fidelity", "local", "--local_steps", "2", "--local_overlap", "0", "--local_after", "0"],
    "compressed": ["--fidelity", "compressed", "--compress_after", "3"],
    "micro-batches": ["--accumulate", "2"],
    "with BatchNorm": ["--model", "small_resnet"],
    "with BatchNorm, local": ["--model", "small_resnet", "--fidelity", "local", "--local_steps", "2"],
}
SMALL, LONG = ["--model", "small_resnet"], "node0:0-30,node1:31-51"
STAGES = {
    "its own twin": ([], "node0:0,node1:1", "node0:0,node1:1", "mnist_lenet", 2),
    "like a larger one": ([], "node0:0,node1:1", LONG, "resnet152_cifar", 2),
    "at once": (["--schedule", "1f1b"], "node0:0,node1:1", LONG, "resnet152_cifar", 2),
    "in 16 bits": (["--fidelity", "half"], "node0:0,node1:1", LONG, "resnet152_cifar", 2),
    "late": (["--fidelity", "late", "--accumulate", "2"], "node0:0,node1:1", LONG, "resnet152_cifar", 2),
    "with BatchNorm": (SMALL, "node0:0-1,node1:2-4", LONG, "resnet152_cifar", 2),
}
"""Settings; the stages of the network that learns, and those of the one whose time is kept; the latter; ranks."""
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
    (plain, paced) = learned(tmp_path, [*RUN, *WAYS[way]], [*RUN, *WAYS[way]], "mnist_lenet")
    assert paced[0] == [pytest.approx(losses, rel=1e-4) for losses in plain[0]]
    assert paced[1:] == (pytest.approx(plain[1], rel=1e-4), pytest.approx(plain[2], abs=0.01))


@pytest.mark.parametrize("way", STAGES)
def test_stages_learn_to_the_bit_what_they_learn_without_a_pace(tmp_path, way):
    words, own, timed, like, ranks = STAGES[way]
    words = [*RUN, "--strategy", "pipeline", *words]
    (plain, paced) = learned(tmp_path, [*words, "--stages", own], [*words, "--stages", timed], like, ranks)
    assert paced == plain


def learned(folder, plain, paced, like, world_size=2):
    """Losses of all updates on each rank, and the evaluation's loss and accuracy: without a pace, and with one."""
    paces = [
        {"ORCH_PACED": json.dumps({"samples_per_s": 2000 * (rank + 1), "like": like})} for rank in range(world_size)
    ]
    for name, words, of_ranks in (("plain", plain, ()), ("paced", paced, paces)):
        (tmp := folder / name).mkdir()
        lines = trained(tmp, words, world_size, of_ranks=of_ranks)
        (judged,) = of_event(lines[0], "eval")
        assert of_event(lines[0], "start")[0]["paced"] is (name == "paced")
        assert [rank[-1]["valid"] is None for rank in lines] == [name == "plain"] * world_size
        yield [[step["loss"] for step in of_event(rank, "step")] for rank in lines], judged["loss"], judged["accuracy"]


def test_a_stages_tasks_are_due_in_the_large_ones_time_and_give_the_small_ones_gradients():
    clock = TestsOwnClock()
    first, last, own = staged(clock)
    images, labels = torch.randn(6, *SHAPE), torch.arange(6) % 10
    began_s = clock.now()
    sent = first.forward(images, 0.0)
    assert sent.shape == (6, 4096) and not sent[:, 400:].any(), "as many numbers as ResNet-152 sends"
    assert clock.now() - began_s == pytest.approx(0.7 * FORWARD * 0.6)
    inputs = last.enter(sent)
    last.judge(inputs, cross_entropy(last.part(inputs), labels, reduction="sum"), clock.now())
    gradient = last.backward(None, 6, clock.now())
    assert gradient.shape == (6, 4096) and not gradient[:, 400:].any()
    first.backward(gradient, 6, clock.now())
    for stage in (last, first):
        stage.weights()
    beside = 0.3 * BACKWARD / 2  # the last stage's weights, while the first one is at its backward
    assert clock.now() - began_s == pytest.approx(0.6 * (FORWARD + BACKWARD - beside))
    cross_entropy(own(images), labels).backward()
    found = {name: weight.grad for stage in (first, last) for name, weight in stage.part.network.named_parameters()}
    assert all(torch.equal(found[name], weight.grad) for name, weight in own.named_parameters()) and len(found) == 10


def staged(clock):
    """Two stages of LeNet within the time of ResNet-152's, 0.7 and 0.3 of it, and LeNet whole."""
    torch.manual_seed(1)
    own = build_model("lenet", SHAPE, 10)
    parts = [part_of(copy.deepcopy(own), Stage("", number, number)) for number in (0, 1)]
    clocks = [StageClock(Pace(samples_per_s=10), work, work, clock=clock) for work in (0.7, 0.3)]
    first = LearningPart([torch.empty(3)], clocks[0], parts[0], None, 4096)
    last = LearningPart([torch.empty(5)], clocks[1], parts[1], (16, 5, 5), None)
    return *(LearningStage(part, Full(), reads=part is first, splits=True) for part in (first, last)), own


def test_a_stage_whose_arithmetic_takes_too_long_is_late():
    clock = TestsOwnClock()
    stage, _, _ = staged(clock)
    stage.part.network.register_forward_pre_hook(lambda *_: clock.sleep(1.0))  # the task would take 0.14 s
    optimizer = LearnerOptimizer(stage.part, torch.optim.SGD(stage.part.network.parameters(), lr=0.1))
    optimizer.zero_grad()
    sent = stage.forward(torch.randn(6, *SHAPE), 0.0)
    stage.backward(torch.ones_like(sent), 6, 0.0)
    stage.weights()
    optimizer.step()
    assert stage.stopwatch.median_lateness(0) == pytest.approx((1 - 0.42 * FORWARD) / (0.42 * (FORWARD + BACKWARD)))


def test_the_optimisers_arithmetic_lies_within_its_time():
    clock = TestsOwnClock()
    part = staged(clock)[0].part
    own = torch.optim.SGD(part.network.parameters(), lr=0.1)
    own.register_step_pre_hook(lambda *_: clock.sleep(0.004))
    optimizer = LearnerOptimizer(part, own)
    optimizer.zero_grad()
    part.stopwatch.take(1.0)
    before_s = clock.now()
    optimizer.step()
    assert clock.now() - before_s == pytest.approx(OPTIMISER) and own.param_groups is optimizer.param_groups


@pytest.mark.parametrize(("last", "own_last"), [(6, 0), (20, 1), (40, 2), (48, 3)])
def test_the_network_that_learns_is_cut_where_the_other_ones_work_is(last, own_last):
    own, like = survey("small_resnet", SHAPE, 10), chain_like("resnet152_cifar")
    layout = Layout.of(parse_stages(f"a:0-{last},b:{last + 1}-51"), ["a", "b"], len(like))
    cut = learning_cut("resnet152_cifar", own, like, layout)
    assert [(stage.first, stage.last) for stage in cut.layout.pipelines[0]] == [(0, own_last), (own_last + 1, 4)]
    assert cut.layout.ranks == layout.ranks


def test_its_own_twin_is_cut_as_asked():
    own = survey("small_resnet", SHAPE, 10)
    layout = Layout.of(parse_stages("a:0-3,b:4"), ["a", "b"], len(own))
    assert learning_cut("x", own, own, layout).layout is layout


def test_a_cut_where_more_would_be_sent_than_by_the_other_is_refused():
    own, like = survey("small_resnet", SHAPE, 10), survey("lenet", SHAPE, 10)
    layout = Layout.of(parse_stages("a:0,b:1"), ["a", "b"], len(like))
    with pytest.raises(
        ValueError,
        match=r"block . of the network that learns sends .* numbers per sample, but the simulated network only 400",
    ):
        learning_cut("mnist_lenet", own, like, layout)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategy", "tensor"], "use another strategy than tensor"),
        (["--checkpoint_every", "3"], "no weights that could be kept"),
    ],
)
def test_what_a_learner_cannot_do_is_refused(tmp_path, words, said):
    paces = [{"ORCH_PACED": '{"samples_per_s": 900, "like": "mnist_lenet"}'}] * 2
    with started(tmp_path, [*RUN, *words], 2, of_ranks=paces) as ranks:
        assert all(said in errors for _, errors in [rank.communicate(timeout=60) for rank in ranks])


def test_ranks_that_are_like_different_networks_are_refused(tmp_path):
    likes = ({"like": "mnist_lenet"}, {"like": "resnet152_cifar"})
    paces = [{"ORCH_PACED": json.dumps({"samples_per_s": 900, **like})} for like in likes]
    with started(tmp_path, [*RUN, "--strategy", "pipeline"], 2, of_ranks=paces) as ranks:
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert all("rank 0: mnist_lenet, rank 1: resnet152_cifar); give all the same" in errors for errors in said)


def test_what_it_is_like_is_an_experiment():
    assert read_pace('{"samples_per_s": 3, "like": "resnet152_cifar"}').like == "resnet152_cifar"
    with pytest.raises(TrainError, match="like must be one of mnist_lenet"):
        read_pace('{"samples_per_s": 3, "like": "resnet"}')
