"""A script's own network that is cut over ranks makes the updates of one process, or is refused before the first."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from tests.support.gloo_ranks import RANKS, Gang, Leaves, script_met
from tests.support.sums import NEWEST_FSDP
from trainer.compute.models import evaluated
from trainer.data import SampleStream
from trainer.ranks import RankInfo
from trainer.session import Session
from trainer.setup import CustomScript, assemble
from trainer.shared import TrainError
from trainer.training.run import shared_network

SAMPLES, BATCH, EPOCHS, LR = 29, 10, 2, 0.05
"""The last batch of an epoch is a short one: 6 updates. 10 and 9 samples are cut into unequal micro-batches."""
CLOSE = 1e-12
"""Distance from one process's weights, as a part of the way that these have come."""


class Data:
    """inputs, targets: of a sample, from its own generator."""

    def __init__(self, inputs: Callable[[torch.Generator], Any], targets: Callable[[torch.Generator], Any]) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return self.inputs(generator), self.targets(generator)


class Unlabelled(Data):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0]


def points(generator: torch.Generator) -> Tensor:
    return torch.randn(6, generator=generator, dtype=torch.float64)


def words(generator: torch.Generator) -> Tensor:
    return torch.randint(11, (5,), generator=generator)


def label(generator: torch.Generator) -> int:
    return int(torch.randint(3, (), generator=generator))


def number(generator: torch.Generator) -> Tensor:
    return torch.randn(3, generator=generator, dtype=torch.float64)


def named(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": points(generator), "y": points(generator)}


def one_named(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": points(generator)}


# ---------------------------------------------------------------------------------------------------------------------
# Networks


class Residual(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :3] + super().forward(inputs)


class Named(nn.Sequential):
    """A subclass with no forward pass of its own."""


class Take(nn.Module):
    def forward(self, outputs: Any) -> Tensor:
        found: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return found.mean(dim=1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, inputs: Any) -> Any:
        value = inputs[0] if isinstance(inputs, tuple) else inputs
        return self.inner(value), value


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.attention(inputs, inputs, inputs, need_weights=False)[0]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs += self.shift
        return inputs


class Cut(nn.Linear):
    """Gives no gradient to what is before it."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.detach())


class Counting(nn.Linear):
    """Counts its passes in a buffer that it may share."""

    def __init__(self, counter: Tensor) -> None:
        super().__init__(8, 8)
        self.register_buffer("counter", counter)

    def forward(self, inputs: Tensor) -> Tensor:
        self.counter += 1
        return super().forward(inputs) * self.counter


class Checkpointed(nn.Module):
    """A block that is used twice and computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.reentrant = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3), reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.inner, hidden, use_reentrant=self.reentrant).tanh()
        found: Tensor = self.last(hidden)
        return found


class Masked(nn.Linear):
    def __init__(self, mask: Tensor) -> None:
        super().__init__(8, 8)
        self.register_buffer("mask", mask)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.mask


class Branches(nn.Linear):
    """Few samples take the second layer, and none the third."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.rare, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if inputs.is_meta or not (few := inputs[:, 0] > 0.5).any():
            return outputs
        return outputs.index_add(0, few.nonzero()[:, 0], self.rare(inputs[few]))


class AcrossSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs.transpose(0, 1).contiguous().mean(dim=-1).t()).t()


def plain(*, last: int = 3) -> list[nn.Module]:
    return [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, last)]


def sequence() -> nn.Sequential:
    return nn.Sequential(*plain())


def own_forward() -> nn.Sequential:
    return Residual(*plain())


def own_forward_of_instance() -> nn.Sequential:
    model = sequence()
    model.forward = lambda inputs: nn.Sequential.forward(model, 3 * inputs)  # type: ignore[method-assign]
    return model


def subclass() -> nn.Sequential:
    return Named(*plain())


def inner_forward() -> nn.Sequential:
    """An own forward pass inside, of a block that stays whole."""
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    inner.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), inner, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))


def hooked(name: str) -> nn.Sequential:
    model = sequence()
    if name == "before":
        model.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    elif name == "after":
        model.register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        model.register_full_backward_hook(lambda module, of_inputs, of_outputs: None)
    return model


def inner_hooks() -> nn.Sequential:
    model = sequence()
    model[2].register_forward_hook(lambda module, inputs, output: 2 * output)
    model[4].register_full_backward_hook(lambda module, of_inputs, of_outputs: (of_inputs[0] * 0.5,))
    model[4].weight.register_hook(lambda gradient: gradient * 0.5)
    return model


def used_twice_far_apart() -> nn.Sequential:
    same = nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(6, 8), same, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), same, nn.Linear(8, 3))


def used_twice_side_by_side() -> nn.Sequential:
    same = nn.Linear(8, 8)
    layers = [nn.Linear(6, 8), same, nn.Tanh(), same, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    return nn.Sequential(*layers, nn.Linear(8, 3))


def same_activation() -> nn.Sequential:
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 3))


def tied_embedding() -> nn.Sequential:
    embedding, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), Take(), head)


def tied_side_by_side() -> nn.Sequential:
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.weight = one.weight
    layers = [nn.Linear(6, 8), nn.Tanh(), one, nn.Tanh(), other, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    return nn.Sequential(*layers, nn.Linear(8, 3))


def one_memory() -> nn.Sequential:
    """Two weights, each of which is the other's numbers."""
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.weight = nn.Parameter(one.weight.detach())
    return nn.Sequential(nn.Linear(6, 8), one, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), other, nn.Linear(8, 3))


def shared_counter() -> nn.Sequential:
    counter = torch.zeros((), dtype=torch.float64)
    return nn.Sequential(nn.Linear(6, 8), Counting(counter), nn.Tanh(), Counting(counter), nn.Linear(8, 3))


def shared_mask() -> nn.Sequential:
    mask = torch.arange(8) % 3 / 2.0
    return nn.Sequential(nn.Linear(6, 8), Masked(mask), nn.Tanh(), Masked(mask), nn.Tanh(), nn.Linear(8, 3))


def further_weights() -> nn.Sequential:
    model = sequence()
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    return model


def transformer() -> nn.Sequential:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    return nn.Sequential(nn.Embedding(11, 8), layer(), Attention(), layer(), Take(), nn.Linear(8, 3))


def recurrent() -> nn.Sequential:
    lstm, gru = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
    first, last = nn.Sequential(lstm, First()), nn.Sequential(gru, Take())
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), first, last, nn.Linear(8, 3))


class First(nn.Module):
    def forward(self, outputs: Any) -> Tensor:
        found: Tensor = outputs[0]
        return found


def tuples() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), Two(), Two(), Two(), First(), nn.Linear(8, 3))


def frozen() -> nn.Sequential:
    model = sequence()
    for weight in [*model[0].parameters(), *model[2].parameters(), *model[4].parameters()]:
        weight.requires_grad_(False)
    return model


def frozen_in_between() -> nn.Sequential:
    model = sequence()
    for weight in [model[2].weight, model[4].weight, model[4].bias]:
        weight.requires_grad_(False)
    return model


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), InPlace(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))


def no_way_back() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Cut(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))


def two_types() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), Rounded(), nn.Linear(8, 3).float())


class Rounded(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.float()


def across_samples() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(11, 8), AcrossSamples(), nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 3))


def by_spectral_norm() -> nn.Sequential:
    model = sequence()
    model[0] = nn.utils.spectral_norm(model[0])
    return model


def parametrized() -> nn.Sequential:
    model = sequence()
    nn.utils.parametrizations.weight_norm(model[2])
    return model


def own_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    class Shifted(ResNet):
        def forward(self, images: Tensor) -> Tensor:
            found: Tensor = super().forward((images - 3) * 5)
            return found

    return Shifted(BasicBlock, [1, 1, 1, 1], num_classes=3)


def mean_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return mse_loss(outputs, targets, reduction="sum")


def of_signs(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.where(targets, outputs, -outputs).exp().sum()


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="sum")


def to_one(outputs: Tensor, targets: Tensor) -> Tensor:
    return mse_loss(outputs[:, 0], targets, reduction="sum")


def plain_of(points_data: Callable[[torch.Generator], Any] = points, of: Any = label) -> Callable[[], Data]:
    return lambda: Data(points_data, of)


Network = tuple[Callable[[], nn.Module], Callable[[], Data], Callable[[Tensor, Any], Tensor]]

EXACT: dict[str, Network] = {
    "plain": (sequence, plain_of(), entropy),
    "a subclass without a forward pass of its own": (subclass, plain_of(), entropy),
    "an inner block with a hook": (inner_forward, plain_of(), entropy),
    "hooks of layers and weights": (inner_hooks, plain_of(), entropy),
    "a module used twice, side by side": (used_twice_side_by_side, plain_of(), entropy),
    "one activation for all": (same_activation, plain_of(), entropy),
    "a weight used twice, side by side": (tied_side_by_side, plain_of(), entropy),
    "a buffer in two places": (shared_mask, plain_of(), entropy),
    "torch's transformer": (transformer, plain_of(words), entropy),
    "torch's recurrent layers": (recurrent, plain_of(words), entropy),
    "frozen first stages": (frozen, plain_of(), entropy),
    "frozen weights in between": (frozen_in_between, plain_of(), entropy),
    "spectral norm": (by_spectral_norm, plain_of(), entropy),
    "weight norm": (parametrized, plain_of(), entropy),
    "labels of 64 bits": (lambda: nn.Sequential(*plain(last=1)), plain_of(of=lambda g: number(g)[0]), to_one),
    "labels of 32 bits": (lambda: nn.Sequential(*plain(last=1)), plain_of(of=lambda g: number(g)[0].float()), to_one),
    "labels that are true or false": (sequence, plain_of(of=lambda g: number(g) > 0), of_signs),
    "several labels a sample": (sequence, plain_of(of=number), mean_squares),
}
REFUSED: dict[str, tuple[Network, str]] = {
    "own forward pass": ((own_forward, plain_of(), entropy), "Residual has its own forward pass"),
    "own forward pass of the instance": (
        (own_forward_of_instance, plain_of(), entropy),
        "Sequential has its own forward pass",
    ),
    "a hook before": ((lambda: hooked("before"), plain_of(), entropy), "Sequential has hooks, which"),
    "a hook after": ((lambda: hooked("after"), plain_of(), entropy), "Sequential has hooks, which"),
    "a hook backward": ((lambda: hooked("back"), plain_of(), entropy), "Sequential has hooks, which"),
    "a module used twice": ((used_twice_far_apart, plain_of(), entropy), "1.weight is used again in 5"),
    "a tied embedding": (
        (tied_embedding, plain_of(words, lambda g: int(words(g)[0])), entropy),
        "0.weight is used again in 6",
    ),
    "two weights in one memory": ((one_memory, plain_of(), entropy), "1.weight is used again in 5"),
    "a counter in two places": ((shared_counter, plain_of(), entropy), "share 1.counter and change it"),
    "weights of the whole": ((further_weights, plain_of(), entropy), "scale belongs to no block"),
    "tuples between blocks": ((tuples, plain_of(), entropy), "block 1 (Two) returns a tuple"),
    "a block that changes its input": ((in_place, plain_of(), entropy), "block 1 (InPlace)"),
    "a block without a gradient": ((no_way_back, plain_of(), entropy), "block 1 (Cut) gives no gradient"),
    "two types": ((two_types, plain_of(), entropy), "returns torch.float32"),
    "samples not first": ((across_samples, plain_of(words), entropy), "block 1 (AcrossSamples)"),
    "own ResNet": (
        (own_resnet, plain_of(lambda g: torch.randn(3, 8, 8, generator=g, dtype=torch.float64)), entropy),
        "Shifted has its own forward pass",
    ),
    "several inputs": ((sequence, plain_of(named), entropy), "batches of inputs and labels"),
    "named inputs": ((sequence, plain_of(one_named), entropy), "batches of inputs and labels"),
    "labels that are no tensors": (
        (sequence, plain_of(of=lambda g: str(label(g))), entropy),
        "batches of inputs and labels",
    ),
    "several tensors of labels": (
        (sequence, plain_of(of=lambda g: (label(g), label(g))), entropy),
        "batches of inputs and labels",
    ),
    "no labels": ((sequence, lambda: Unlabelled(points, label), entropy), "batches of inputs and labels"),
}
NETWORKS = {**EXACT, **{name: network for name, (network, _) in REFUSED.items()}}
WAYS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "four stages": ({"accumulate": "3", "schedule": "1f1b"}, ("a", "b", "c", "d")),
    "two stages of two ranks": ({"accumulate": "4"}, ("a", "b", "a", "b")),
    "three stages": ({"accumulate": "3"}, ("a", "b", "c", "c")),
}
"""Settings, and the ranks' hosts."""


def built(name: str) -> tuple[nn.Module, Data, Callable[[Tensor, Any], Tensor]]:
    make, data, loss = NETWORKS[name]
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        return make(), data(), loss
    finally:
        torch.set_default_dtype(torch.float32)


def optimiser(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum, weight_decay=0.01)


def one_process(
    name: str, parts: int, momentum: float = 0.9, clip_norm: float = 0.0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The first state and the last. parts: how often a batch is passed, as what counts passes sees it."""
    model, data, loss = built(name)
    first = copy.deepcopy(model.state_dict())
    steps, stream = optimiser(model, momentum), SampleStream(SAMPLES, BATCH, (BATCH,), seed=0)
    for epoch in range(EPOCHS):
        for step in range(stream.steps):
            inputs, targets = default_collate([data[index] for index in stream.indices(epoch, step, 0)])
            model.zero_grad()
            for part, said in zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True):
                (loss(model(part), said) / len(targets)).backward()
            if clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            steps.step()
    return first, model.state_dict()


def in_the_gang(
    rank: int, nodes: tuple[str, ...], **asked: str
) -> contextlib.AbstractContextManager[assemble.JoinedRank]:
    info = RankInfo(rank, rank, RANKS, RANKS, "vm", nodes[rank], None, None)
    return script_met(info, {"batch": str(BATCH), "epochs": str(EPOCHS), **asked})


def trained(rank: int, case: tuple[str, dict[str, str], tuple[str, ...]]) -> dict[str, Tensor] | str:
    """What this rank holds of the state; or why it was refused."""
    name, asked, nodes = case
    with in_the_gang(rank, nodes, **asked) as met:
        model, data, loss = built(name)
        try:
            steps = optimiser(model, 0.0 if "fidelity" in asked else 0.9)
            run = Session(assemble.prepare(met, CustomScript(model, steps, data, default_collate)))
        except TrainError as error:
            return str(error)
        for _ in run.epochs():
            for inputs, targets in run.batches():
                run.step(loss(run.model(inputs), targets))
            run.evaluate(lambda outputs, targets: {"loss": loss(outputs, targets)}, data)
        run.end()
        return {name: tensor.clone() for name, tensor in run.run.model.state_dict().items()}


def trained_until_refused(rank: int, case: tuple[str, dict[str, str], tuple[str, ...]]) -> Leaves:
    """Ends the process, as an error ends a script: the other ranks lose it."""
    try:
        return Leaves(trained(rank, case))
    except (TrainError, RuntimeError) as error:
        return Leaves(str(error))


def off(first: dict[str, Tensor], last: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Distance of what was found from `last`, as a part of the way there."""
    far = sum((tensor - last[name]).double().square().sum().item() for name, tensor in found.items())
    way = sum((last[name] - tensor).double().square().sum().item() for name, tensor in first.items())
    return math.sqrt(far / way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EXACT)
def test_a_network_that_is_cut_makes_the_updates_of_one_process(gang: Gang, name: str, way: str) -> None:
    asked, nodes = WAYS[way]
    if name == "spectral norm" and way == "two stages of two ranks":
        pytest.skip("each of two ranks moves its buffers by the micro-batches that it takes, as under ddp")
    first, last = one_process(name, int(asked["accumulate"]))
    answers = gang.run(trained, (name, {"strategy": "pipeline", **asked}, nodes), timeout_s=60)
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    assert set().union(*answers) == set(last)
    assert max(off(first, last, found) for found in answers) <= CLOSE


NOT_BY_TENSOR = ("of the instance", "label", "input", "two types", "counter", "samples", "backward")
ZEROS = {"unused_parameters": "zeros"}
MORE: list[tuple[str, dict[str, str], tuple[str, ...]]] = [
    ("a module used twice", {"accumulate": "3"}, ("a", "b", "a", "b")),
    ("two weights in one memory", {"accumulate": "2"}, ("a", "b", "c", "c")),
    ("frozen first stages", {"ema": "0.8"}, ("a", "b", "c", "d")),
    ("frozen first stages", {"clip_norm": "1000"}, ("a", "b", "a", "b")),
    (
        "frozen weights in between",
        {"fidelity": "local", "local_steps": "1", "local_overlap": "0", "stages": "a:0-1,b:2-3|c:0-1,d:2-3"},
        ("a", "b", "c", "d"),
    ),
    ("labels that are true or false", {"accumulate": "3"}, ("a", "b", "c", "d")),
    ("branches", {**ZEROS, "accumulate": "3"}, ("a", "b", "c", "d")),
    ("branches", {**ZEROS, "accumulate": "4"}, ("a", "b", "a", "b")),
    ("branches", {**ZEROS, "stages": "a:0-1,b:2-3|c:0-1,d:2-3"}, ("a", "b", "c", "d")),
]


@pytest.mark.parametrize(("name", "asked", "nodes"), MORE)
def test_other_ways_make_them_too(gang: Gang, name: str, asked: dict[str, str], nodes: tuple[str, ...]) -> None:
    first, last = one_process(name, 1, momentum=0.0 if "fidelity" in asked else 0.9)
    answers = gang.run(trained, (name, {"strategy": "pipeline", **asked}, nodes), timeout_s=60)
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    assert max(off(first, last, found) for found in answers) <= CLOSE


def of_last_layers(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    """Lacks the first layer, which is not frozen."""
    return torch.optim.SGD(list(model.parameters())[2:], lr=LR, momentum=momentum)


def trained_in_part(rank: int, case: tuple[str, dict[str, str], tuple[str, ...]]) -> dict[str, Tensor] | str:
    with mock.patch(f"{__name__}.optimiser", of_last_layers):
        return trained(rank, case)


@pytest.mark.parametrize(
    "asked",
    [
        {"strategy": "allreduce_flat"},
        {"strategy": "allreduce", "accumulate": "2"},
        {"strategy": "ddp"},
        {"strategy": "pipeline", "stages": "a:0-1,b:2-3|c:0-1,d:2-3"},
    ],
    ids=lambda asked: asked["strategy"],
)
def test_gradients_of_weights_that_the_optimiser_lacks_do_not_pile_up(
    gang: Gang, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str]
) -> None:
    """Clipping counts them."""
    answers = gang.run(trained_in_part, ("plain", {**asked, "clip_norm": "0.1"}, ("a", "b", "c", "d")), timeout_s=60)
    monkeypatch.setattr(sys.modules[__name__], "optimiser", of_last_layers)
    first, last = one_process("plain", 1, clip_norm=0.1)
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    assert max(off(first, last, found) for found in answers) <= CLOSE


@pytest.mark.parametrize("nodes", [("a", "b", "c", "d"), ("a", "b", "a", "b")])
def test_a_stage_with_unused_weights_is_refused(tmp_path: Path, nodes: tuple[str, ...]) -> None:
    own = Gang(tmp_path)
    try:
        case = ("branches", {"strategy": "pipeline", "accumulate": "4"}, nodes)
        answers = own.run(trained_until_refused, case, timeout_s=60)
    finally:
        own.end()
    assert any("the loss does not depend on" in str(answer) for answer in answers), answers


def test_a_stage_without_weights_to_average_is_refused(gang: Gang) -> None:
    asked = {"strategy": "pipeline", "fidelity": "local", "stages": "a:0-1,b:2-3|c:0-1,d:2-3"}
    answers = gang.run(trained, ("frozen first stages", asked, ("a", "b", "c", "d")), timeout_s=60)
    assert all("'a' would hold frozen blocks only" in answer for answer in answers)


@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
@pytest.mark.parametrize(
    "name", ["a weight used twice, side by side", "a module used twice, side by side", "frozen first stages"]
)
def test_a_run_goes_on_with_other_stages(gang: Gang, name: str, strategy: str, tmp_path: Path) -> None:
    first, last = one_process(name, 1)
    kept = {"strategy": strategy, "checkpoint_dir": str(tmp_path), "checkpoint_every": "2"}
    gang.run(trained, (name, {**kept, "steps": "2"}, ("a", "b", "c", "d")), timeout_s=60)
    gang.run(trained, (name, {**kept, "resume": str(tmp_path)}, ("a", "b", "c", "c")), timeout_s=60)
    saved = torch.load(tmp_path / "step-000000006.pt", weights_only=True)["model"]
    assert saved.keys() == last.keys()
    assert off(first, last, saved) <= CLOSE


TENSOR = [name for name in NETWORKS if not any(word in name for word in NOT_BY_TENSOR)]


@pytest.mark.parametrize("name", TENSOR)
def test_a_network_whose_layers_are_cut_makes_the_updates_of_one_process(gang: Gang, name: str) -> None:
    first, last = one_process(name, 1)
    answers = gang.run(trained, (name, {"strategy": "tensor"}, ("a", "b", "c", "d")), timeout_s=60)
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    whole = {name: joined([answer[name] for answer in answers], last[name]) for name in last}
    assert off(first, last, whole) <= CLOSE


def joined(of_ranks: list[Tensor], like: Tensor) -> Tensor:
    """The slices of a tensor one after the other; or the tensor that all ranks hold alike."""
    if all(tensor.shape == like.shape for tensor in of_ranks):
        assert all(torch.equal(tensor, of_ranks[0]) for tensor in of_ranks)
        return of_ranks[0]
    return torch.cat(of_ranks)


@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_would_train_as_another_is_refused(gang: Gang, name: str) -> None:
    asked, nodes = WAYS["four stages"]
    answers = gang.run(trained, (name, {"strategy": "pipeline", **asked}, nodes), timeout_s=60)
    _, expected = REFUSED[name]
    assert all(isinstance(answer, str) and expected in answer and "\n" not in answer for answer in answers), answers


# ---------------------------------------------------------------------------------------------------------------------
# Modes and buffers


class Remembering(nn.Module):
    """BatchNorm, a causal mask, and what some networks keep in buffers: a queue of what was seen, and how much."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("allowed", torch.ones(3, 3, dtype=torch.bool).tril())
        self.register_buffer("queue", torch.zeros(4, 6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and len(inputs):
            self.queue = torch.cat([inputs.detach(), self.queue])[:4]
            self.seen = self.seen + len(inputs)
        else:
            self.seen = self.seen + 1000  # an evaluation leaves no trace
        scores = self.layer(self.norm(inputs))
        weights = (scores[:, :, None] * scores[:, None, :] + self.mask).softmax(dim=-1)
        return scores + (weights * self.allowed).sum(dim=-1) + self.queue.mean()


def fine_tuned() -> nn.Sequential:
    """BatchNorm stays as it was trained, and so does Dropout."""
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 3)
    )
    model[1].running_mean += 0.3
    for module in (model[1], model[3]):
        module.eval()
    return model


NETWORKS |= {
    "branches": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Branches(), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)),
        plain_of(),
        entropy,
    ),
    "fine-tuned": (fine_tuned, plain_of(), entropy),
    "remembering": (Remembering, plain_of(), entropy),
    "normed": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), plain_of(), entropy),
    "checkpointed": (lambda: Checkpointed(reentrant=False), plain_of(), entropy),
    "checkpointed, reentrant": (lambda: Checkpointed(reentrant=True), plain_of(), entropy),
}
KEEP_MODES: dict[str, dict[str, str]] = {
    "ddp": {},
    "lone samples": {"shares": "a=4,b=4,c=1,d=1", "strategy": "allreduce_flat"},
    "micro-batches": {"accumulate": "2"},
    "averaged": {"ema": "0.9"},
    "pipeline": {"strategy": "pipeline", "accumulate": "10", "stages": "a:0,b:1,c:2,d:3"},
    "tensor": {"strategy": "tensor", "accumulate": "2"},
    "local": {"fidelity": "local", "local_steps": "1", "local_overlap": "0"},
}


@pytest.mark.parametrize("way", KEEP_MODES)
def test_modules_in_eval_mode_stay_in_it(gang: Gang, way: str) -> None:
    asked = KEEP_MODES[way]
    first, last = one_process("fine-tuned", 1, momentum=0.0 if "fidelity" in asked else 0.9)
    answers = gang.run(trained, ("fine-tuned", asked, ("a", "b", "c", "d")), timeout_s=60)
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    if way == "tensor":
        answers = [{name: joined([answer[name] for answer in answers], last[name]) for name in last}]
    plain_names = [{name.removeprefix("module."): tensor for name, tensor in answer.items()} for answer in answers]
    assert max(off(first, last, found) for found in plain_names) <= CLOSE


def test_a_lone_sample_is_refused_if_batch_norm_would_normalise_by_it(gang: Gang) -> None:
    asked = KEEP_MODES["lone samples"]
    assert all("BatchNorm needs two" in answer for answer in gang.run(trained, ("remembering", asked, tuple("abcd"))))


def remembered(rank: int, asked: dict[str, str]) -> tuple[dict[str, Tensor], list[float]]:
    """The state of this rank at the end, and what the evaluations gave."""
    with in_the_gang(rank, ("a", "b", "c", "d"), **asked) as met:
        model, data, loss = built("remembering")
        run = Session(assemble.prepare(met, CustomScript(model, optimiser(model), data, default_collate)))
        found = []
        for _ in run.epochs():
            for inputs, targets in run.batches():
                run.step(loss(run.model(inputs), targets))
            found.append(run.evaluate(lambda outputs, targets: {"loss": loss(outputs, targets)}, data)["loss"])
        run.end()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}, found


def test_buffers_that_are_no_statistics_are_left_alone(gang: Gang, tmp_path: Path) -> None:
    shares = {"strategy": "allreduce_flat", "shares": "a=4,b=3,c=3,d=0"}
    kept = {**shares, "checkpoint_dir": str(tmp_path), "checkpoint_every": "2"}
    whole = gang.run(remembered, {**kept, "checkpoint_dir": str(tmp_path / "whole")})
    mask = torch.full((3, 3), -math.inf).triu(1)
    for state, found in whole:
        assert torch.equal(state["mask"], mask)
        assert all(map(math.isfinite, found))
    assert [int(state["seen"]) % 1000 for state, _ in whole][:3] == [22, 18, 18]
    saved = torch.load(tmp_path / "whole" / "step-000000006.pt", weights_only=True)
    assert torch.equal(saved["model"]["mask"], mask)
    assert torch.equal(saved["model"]["queue"], whole[0][0]["queue"])
    gang.run(remembered, {**kept, "steps": "2"})
    for (state, found), (again, found_again) in zip(
        whole, gang.run(remembered, {**kept, "resume": str(tmp_path)}), strict=True
    ):
        assert found_again == found
        assert not [name for name in state if not torch.equal(state[name], again[name])]
    (tmp_path / "step-000000006.pt").unlink()
    (tmp_path / "step-000000004.pt").unlink()


def test_other_ranks_begin_with_the_first_ones_buffers(gang: Gang, tmp_path: Path) -> None:
    kept = {"strategy": "allreduce_flat", "checkpoint_dir": str(tmp_path), "checkpoint_every": "2"}
    written = gang.run(remembered, {**kept, "steps": "2", "shares": "a=4,b=3,c=3,d=0"})
    more = {**kept, "resume": str(tmp_path), "steps": "2", "shares": "a=3,b=3,c=2,d=2"}
    for state, _ in gang.run(remembered, more):
        assert all(torch.equal(state[name], written[0][0][name]) for name in ("mask", "allowed", "queue", "seen"))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("checkpointed", "ddp"), ("checkpointed, reentrant", "allreduce_flat"), ("checkpointed", "tensor")],
)
def test_a_checkpointed_block_that_is_used_twice_is_trained(gang: Gang, name: str, strategy: str) -> None:
    first, last = one_process(name, 1)
    answers = gang.run(trained, (name, {"strategy": strategy}, ("a", "b", "c", "d")), timeout_s=60)
    named = [{key.removeprefix("module."): tensor for key, tensor in answer.items()} for answer in answers]
    whole = {key: joined([answer[key] for answer in named], last[key]) for key in last}
    assert off(first, last, whole) <= CLOSE


def estimated(rank: int, name: str) -> float | str:
    """How the network is judged whose statistics another one's weights ask for; batches are lists of labels, points."""
    with in_the_gang(rank, ("a", "b", "c", "d"), ema="0.8", strategy="allreduce_flat") as met:
        model, data, loss = built(name)
        turned = {"fine-tuned": lambda rows: default_collate(rows)[::-1], "normed": lambda rows: dict(pairs(rows))}[
            name
        ]
        try:
            run = Session(assemble.prepare(met, CustomScript(model, optimiser(model), data, turned)))
        except TrainError as error:
            return str(error)
        for targets, inputs in run.batches():
            run.step(loss(run.model(inputs), targets))
        with shared_network(run.run, run.progress) as network, evaluated(network):
            return float(network(default_collate([data[0]])[0]).sum().detach())


def pairs(rows: list[Any]) -> Any:
    inputs, targets = default_collate(rows)
    return {"x": inputs, "y": targets}


def test_statistics_are_estimated_again_if_there_are_any_and_batches_tell(gang: Gang) -> None:
    answers = gang.run(estimated, "fine-tuned")
    assert all(isinstance(answer, float) and math.isfinite(answer) for answer in answers), answers
    for answer in gang.run(estimated, "normed"):
        assert str(answer).startswith("a: ema: BatchNorm's statistics are estimated by calling the network")


def test_frozen_statistics_are_those_of_the_checkpoint_to_the_last_digits(gang: Gang, tmp_path: Path) -> None:
    """Written by ranks with parts of 2/3 and 1/3, and taken by others."""
    kept = {"strategy": "allreduce_flat", "checkpoint_dir": str(tmp_path), "checkpoint_every": "2", "steps": "2"}
    gang.run(trained, ("fine-tuned", {**kept, "shares": "a=4,b=2,c=4,d=0"}, ("a", "b", "c", "d")), timeout_s=60)
    resumed = {**kept, "resume": str(tmp_path), "steps": "3"}
    frozen = built("fine-tuned")[0].state_dict()["1.running_mean"]
    for answer in gang.run(trained, ("fine-tuned", resumed, ("a", "b", "c", "d")), timeout_s=60):
        assert isinstance(answer, dict), answer
        torch.testing.assert_close(answer["1.running_mean"], frozen, rtol=1e-15, atol=0)


@pytest.mark.skipif(not NEWEST_FSDP, reason="fsdp needs a newer torch")
def test_a_tied_network_in_pieces_can_be_looked_at(gang: Gang) -> None:
    """To judge it, all ranks gather all weights, also one that stands in two places."""
    first, last = one_process("a tied embedding", 1)
    answers = gang.run(whole_of_pieces, "a tied embedding", timeout_s=60)
    assert max(off(first, last, found) for found in answers) <= CLOSE
    assert set(answers[0]) == set(last)


def whole_of_pieces(rank: int, name: str) -> dict[str, Tensor]:
    with in_the_gang(rank, ("a", "b", "c", "d"), strategy="fsdp") as met:
        model, data, loss = built(name)
        run = Session(assemble.prepare(met, CustomScript(model, optimiser(model), data, default_collate)))
        for _ in run.epochs():
            for inputs, targets in run.batches():
                run.step(loss(run.model(inputs), targets))
            run.evaluate(lambda outputs, targets: {"loss": loss(outputs, targets)}, data)
        return {name: tensor.clone() for name, tensor in run.run.strategy.whole().state_dict().items()}


def told(rank: int, name: str) -> str:
    with in_the_gang(rank, ("a", "b", "c", "d"), strategy="ddp") as met:
        model, data, loss = built(name)
        run = Session(assemble.prepare(met, CustomScript(model, optimiser(model), data, default_collate)))
        try:
            for inputs, targets in run.batches():
                run.step(loss(run.model(inputs), targets))
        except TrainError as error:
            return str(error)
    return "nothing"


def test_what_ddp_cannot_train_is_said_in_a_line(gang: Gang) -> None:
    assert all("use_reentrant=False" in answer for answer in gang.run(told, "checkpointed, reentrant"))
