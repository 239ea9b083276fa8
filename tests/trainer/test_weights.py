"""`run.step(loss_sum, weight=...)`: the mean over weights of the whole batch, over all ranks and micro-batches."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from tests.support.gloo_ranks import Gang
from tests.support.sums import NEWEST_FSDP
from tests.trainer.test_session import LR, Points, in_the_gang, network
from trainer.data import SampleStream
from trainer.session import Session
from trainer.setup import CustomScript, assemble
from trainer.shared import TrainError

SAMPLES, BATCH, EPOCHS = 81, 16, 2
"""The last batch has one sample, for four ranks."""
OF_LABEL = torch.tensor([0.5, 3.0, 40.0], dtype=torch.float64)
SHARES = "node0=9,node1=4,node2=3,node3=0"
WAYS: dict[str, dict[str, str]] = {
    "ddp": {},
    "clipped": {"clip_norm": "0.3", "shares": SHARES},
    "micro-batches": {"accumulate": "2", "shares": SHARES},
    "after backward": {"strategy": "allreduce_flat", "shares": SHARES},
    "pipeline": {"strategy": "pipeline", "accumulate": "4"},
    "two pipelines": {"strategy": "pipeline", "stages": "node0:0,node1:1-3|node2:0,node3:1-3", "accumulate": "2"},
    "tensor": {"strategy": "tensor"},
    **({"fsdp": {"strategy": "fsdp", "shares": SHARES, "accumulate": "2"}} if NEWEST_FSDP else {}),
}


def optimiser(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=0.01)


def one_process(clipped: bool) -> tuple[nn.Module, float]:
    """The network, and the mean of the last epoch's updates."""
    model, data = network(), Points(SAMPLES)
    optimizer, stream = optimiser(model), SampleStream(SAMPLES, BATCH, (BATCH,), seed=0)
    for epoch in range(EPOCHS):
        total = 0.0
        for step in range(stream.steps):
            inputs, targets = default_collate([data[index] for index in stream.indices(epoch, step, 0)])
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets, weight=OF_LABEL)  # the mean: over the sum of the weights
            loss.backward()
            if clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            total += loss.item() * len(targets)
    return model, total / SAMPLES


def weighted_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs), targets, weight=OF_LABEL, reduction="sum")


def trained(rank: int, way: str) -> tuple[dict[str, Tensor], float | None]:
    asked = {"batch": str(BATCH), "epochs": str(EPOCHS), **WAYS[way]}
    with in_the_gang(rank, **asked) as met:
        model = network()
        run = Session(assemble.prepare(met, CustomScript(model, optimiser(model), Points(SAMPLES), default_collate)))
        for _ in run.epochs():
            for number, (inputs, targets) in enumerate(run.batches()):
                weight = OF_LABEL[targets].sum()
                run.step(weighted_loss(run.model, inputs, targets), weight if number % 2 else weight.item())
        run.end()
        return {name: tensor.clone() for name, tensor in run.run.strategy.whole().state_dict().items()}, run.loss


@pytest.mark.parametrize("way", WAYS)
def test_weights_make_the_update_of_one_process(gang: Gang, way: str) -> None:
    model, loss = one_process(clipped=way == "clipped")
    expected, seen = model.state_dict(), set()
    for weights, found in gang.run(trained, way, timeout_s=60):
        assert found == pytest.approx(loss, rel=1e-9)
        for name, tensor in weights.items():
            seen.add(name)
            if tensor.shape == expected[name].shape:
                torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)
            else:
                assert way == "tensor"  # a slice of channels
    assert seen == set(expected)


def refused(rank: int, case: tuple[str, dict[str, str]]) -> str:
    """What is said in which update."""
    mistake, asked = case
    with in_the_gang(rank, **asked) as met:
        model = network()
        run = Session(assemble.prepare(met, CustomScript(model, optimiser(model), Points(SAMPLES), default_collate)))
        try:
            for number, (inputs, targets) in enumerate(run.batches()):
                given = {
                    "on one rank": rank == 1,
                    "sometimes": number < 3,
                    "not at first": number == 3,
                    "in one micro-batch": number == 1,
                }.get(mistake, True)
                weight = {"negative": -1.0, "a text": "7"}.get(mistake, 2.0)
                run.step(weighted_loss(run.model, inputs, targets), weight if given else None)
        except TrainError as error:
            return f"{run.updates}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("mistake", "asked", "words"),
    [
        ("on one rank", {}, "0: weight: step(loss_sum, weight=...) is given on some ranks only"),
        ("sometimes", {}, "3: weight: step(loss_sum, weight=...) is given for some batches only"),
        ("not at first", {}, "3: weight: step(loss_sum, weight=...) is given for some batches only"),
        ("in one micro-batch", {"accumulate": "2"}, "0: weight: step(loss_sum, weight=...) is given for some batches"),
        ("negative", {}, "0: weight: a number of 0 or more is expected, like the tokens of the batch, not -1.0"),
        ("a text", {}, "0: weight: a number of 0 or more is expected, like the tokens of the batch, not '7'"),
        ("averages", {"fidelity": "local"}, "0: weight: with fidelity local or compressed"),
        ("averages", {"strategy": "parameter_average"}, "0: weight: with fidelity local or compressed"),
        ("averages", {"fidelity": "compressed"}, "0: weight: with fidelity local or compressed"),
    ],
)
def test_a_weight_that_cannot_be_used_is_refused(gang: Gang, mistake: str, asked: dict[str, str], words: str) -> None:
    for answer in gang.run(refused, (mistake, asked)):
        assert answer.startswith(words)


def without_tokens(rank: int, _: None) -> bool:
    """An update in which nothing counts leaves the weights alone."""
    with in_the_gang(rank, steps="1", epochs="1") as met:
        model = network()
        before = [weight.clone() for weight in model.parameters()]
        own = CustomScript(model, torch.optim.SGD(model.parameters(), lr=1.0), Points(SAMPLES), default_collate)
        run = Session(assemble.prepare(met, own))
        for inputs, targets in run.batches():
            run.step(weighted_loss(run.model, inputs, targets) * 0, weight=0)
        return all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_batch_without_any_weight_moves_nothing(gang: Gang) -> None:
    assert all(gang.run(without_tokens, None))
