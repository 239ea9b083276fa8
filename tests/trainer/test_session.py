"""A loop of one's own, over ranks that are divided in any way, makes the updates of one process."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections import UserDict
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import default_collate

import trainer
from tests.support.gloo_ranks import RANKS, script_met
from tests.support.sums import NEWEST_FSDP
from trainer.data import SampleStream, moved, pieces, tensors_of
from trainer.ranks import RankInfo
from trainer.session import ASKED, Ranks, Session, asked_for
from trainer.session.join import join
from trainer.setup import CustomScript, assemble
from trainer.shared import SettingsError, TrainError, parse_settings
from trainer.training import is_mean

SAMPLES, TESTS, BATCH, EPOCHS = 88, 37, 16, 2
"""The last batch of an epoch is a short one: 12 updates."""
WAYS: dict[str, dict[str, str]] = {
    "ddp": {},
    "unequal shares, one without any": {"shares": "node0=9,node1=4,node2=3,node3=0", "strategy": "allreduce_flat"},
    "micro-batches": {"accumulate": "2"},
    "pipeline": {"strategy": "pipeline", "accumulate": "4"},
    "two pipelines": {"strategy": "pipeline", "stages": "node0:0,node1:1-3|node2:0,node3:1-3", "accumulate": "2"},
    "tensor": {"strategy": "tensor"},
    **({"fsdp": {"strategy": "fsdp", "shares": "node0=9,node1=4,node2=3,node3=0"}} if NEWEST_FSDP else {}),
    "local, an average an update": {"fidelity": "local", "local_steps": "1", "local_overlap": "0"},
}
MOMENTUM = {"local, an average an update": 0.0}
"""Each rank's own, where weights are averaged."""
RULES: dict[str, dict[str, str]] = {
    "plain": {},
    "cosine": {"lr_schedule": "cosine", "lr_warmup": "0.5"},
    "adamw": {},
    "averaged": {"ema": "0.8"},
    "clipped": {"clip_norm": "0.3"},
    "steps": {"lr_schedule": "step", "lr_steps": "0.5,1.25", "lr_factor": "0.25", "lr_batch": "8"},
}
"""How the weights are moved."""
LR = 0.05


class Points:
    """Any map-style data set: vectors, the pairs of which have the same label, under noise drawn anew each time."""

    def __init__(self, samples: int, noise: float = 0.0) -> None:
        self.samples, self.noise = samples, noise

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        point = torch.randn(6, generator=generator, dtype=torch.float64) + index % 3
        return point + self.noise * torch.rand(6, dtype=torch.float64), index % 3


def network() -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


def optimiser(model: nn.Module, momentum: float, rule: str = "plain") -> torch.optim.Optimizer:
    if rule == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum, weight_decay=0.01)


def judge(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = cross_entropy(outputs, targets, reduction="sum")
    return {"loss": loss, "accuracy": (outputs.argmax(dim=1) == targets).sum(), "firsts": (targets == 0).sum()}


def rate(rule: str, seen: float) -> float:
    """seen: samples, up to the middle of an update."""
    if rule == "cosine":
        warmup = 0.5 * SAMPLES
        if seen < warmup:
            return LR * seen / warmup
        return LR * (1 + math.cos(math.pi * (seen - warmup) / (EPOCHS * SAMPLES - warmup))) / 2
    if rule == "steps":
        return 2 * LR * 0.25 ** ((seen >= 0.5 * SAMPLES) + (seen >= 1.25 * SAMPLES))
    return LR


def one_process(momentum: float = 0.9, rule: str = "plain") -> tuple[nn.Module, dict[str, float]]:
    """What anybody would write."""
    model, data, seen = network(), Points(SAMPLES), 0
    steps = optimiser(model, momentum, rule)
    averaged, updates = copy.deepcopy(model), 0
    stream = SampleStream(SAMPLES, BATCH, (BATCH,), seed=0)
    for epoch in range(EPOCHS):
        for step in range(stream.steps):
            inputs, targets = default_collate([data[index] for index in stream.indices(epoch, step, 0)])
            steps.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            if rule == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            steps.param_groups[0]["lr"] = rate(rule, seen + len(targets) / 2)
            seen += len(targets)
            steps.step()
            updates += 1
            decay = min(0.8, (1 + updates) / (10 + updates)) if rule == "averaged" else 0.0
            for mean, weight in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.data = decay * mean.data + (1 - decay) * weight.data
    inputs, targets = default_collate([Points(TESTS)[index] for index in range(TESTS)])
    with torch.no_grad():
        return model, {name: value.item() / TESTS for name, value in judge(averaged(inputs), targets).items()}


def in_the_gang(rank: int, **asked: str) -> contextlib.AbstractContextManager[assemble.JoinedRank]:
    info = RankInfo(rank, rank, RANKS, RANKS, "vm", f"node{rank}", None, None)
    return script_met(info, {"batch": str(BATCH), "epochs": str(EPOCHS), **asked})


def trained(rank: int, how: tuple[str, str]) -> tuple[dict[str, torch.Tensor], dict[str, float], int]:
    """The weights that this rank holds; what it is said of the test data; and how often the loop's body was run.

    how: one of WAYS, and one of RULES.
    """
    way, rule = how
    with in_the_gang(rank, **WAYS[way], **RULES[rule]) as met:
        model, bodies = network(), 0
        own = CustomScript(model, optimiser(model, MOMENTUM.get(way, 0.9), rule), Points(SAMPLES), default_collate)
        run = Session(assemble.prepare(met, own))
        for _ in run.epochs():
            for inputs, targets in run.batches():
                bodies += 1
                run.step(cross_entropy(run.model(inputs), targets, reduction="sum"))
            found = run.evaluate(judge, Points(TESTS))
        run.end()
        held = {name: tensor.clone() for name, tensor in run.run.strategy.whole().state_dict().items()}
        return held, found, bodies


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", WAYS)
def test_a_loop_of_ones_own_makes_the_updates_of_one_process(gang, way, rule):
    if rule in ("adamw", "averaged", "clipped") and "local" in way:
        pytest.skip("of averaged weights this is not what one process would have, or is refused")
    model, expected = one_process(MOMENTUM.get(way, 0.9), rule)
    weights = model.state_dict()
    seen: set[str] = set()
    for rank, (held, found, bodies) in enumerate(gang.run(trained, (way, rule), timeout_s=60)):
        assert found == pytest.approx(expected, rel=1e-9)
        for name, tensor in held.items():
            whole = weights[name]
            if tensor.shape == whole.shape:
                torch.testing.assert_close(tensor, whole, rtol=1e-9, atol=1e-11)
                seen.add(name)
            else:  # slices of channels
                assert way == "tensor" and any(
                    torch.allclose(tensor, whole[begin : begin + len(tensor)], rtol=1e-9)
                    for begin in range(len(whole) - len(tensor) + 1)
                )
                seen.add(name)
        if "shares" in WAYS[way] and rank == 3:
            assert bodies == (12 if way == "fsdp" else 0)  # without samples it takes part only if ranks meet in forward
    assert seen == set(weights)


def epochs_up_to(rank: int, target: str) -> int:
    with in_the_gang(rank, target_accuracy=target, strategy="pipeline") as met:
        model, epochs = network(), 0
        run = Session(
            assemble.prepare(met, CustomScript(model, optimiser(model, 0.9), Points(SAMPLES), default_collate))
        )
        for _ in run.epochs():
            for inputs, targets in run.batches():
                run.step(cross_entropy(run.model(inputs), targets, reduction="sum"))
            run.evaluate(judge, Points(TESTS))
            epochs += 1
        return epochs


def test_a_script_ends_at_its_target_on_all_ranks(gang):
    assert gang.run(epochs_up_to, "0.01") == [1] * RANKS
    assert gang.run(epochs_up_to, "0.9999") == [EPOCHS] * RANKS


def noisy(rank: int, shares: str) -> list[list[float]]:
    with in_the_gang(rank, shares=shares, epochs="1") as met:
        model = network()
        own = CustomScript(model, optimiser(model, 0.0), Points(SAMPLES, noise=1.0), default_collate)
        run, seen = Session(assemble.prepare(met, own)), []
        for _ in run.epochs():
            for inputs, targets in run.batches():
                seen += inputs.tolist()
                run.step(cross_entropy(run.model(inputs), targets, reduction="sum"))
    return seen


def test_what_a_data_set_draws_by_chance_is_the_same_whoever_draws_it(gang):
    equal, unequal = (
        sorted(sample for rank in gang.run(noisy, shares) for sample in rank)
        for shares in ("equal", "node0=11,node1=2,node2=2,node3=1")
    )
    assert equal == unequal
    assert equal != sorted(Points(SAMPLES)[index][0].tolist() for index in range(SAMPLES))


def out_of_memory(_: torch.Tensor) -> None:
    raise MemoryError


def mistaken(rank: int, mistake: str) -> str:
    with in_the_gang(rank, accumulate="2" if mistake == "swallowed, and more follow" else "1") as met:
        model = network()
        own = CustomScript(model, optimiser(model, 0.0), Points(SAMPLES), default_collate)
        run = Session(assemble.prepare(met, own))
        try:
            run.step(torch.zeros(()))
        except TrainError as error:
            if mistake == "outside":
                return str(error)
        try:
            for inputs, targets in run.batches():
                losses = cross_entropy(run.model(inputs), targets, reduction="none")
                if mistake == "a loss a sample":
                    run.step(losses)
                if mistake == "a mean":
                    run.step(cross_entropy(run.model(inputs), targets))
                if mistake == "a number":
                    run.step(losses.sum().item())
                if mistake == "detached":
                    run.step(losses.sum().detach())
                if mistake == "twice":
                    run.step(losses.sum())
                    run.step(losses.sum())
                if mistake == "no update":
                    run.backward(losses.sum())
                if mistake.startswith("swallowed"):
                    (loss := losses.sum()).register_hook(out_of_memory)
                    with contextlib.suppress(MemoryError):
                        run.step(loss)
                if mistake == "moved, and again":
                    run.run.strategy.after_update = partial(out_of_memory, inputs)
                    run.backward(losses.sum())
                    for _ in range(2):
                        with contextlib.suppress(MemoryError):
                            run.update()
                if mistake == "after a break":
                    break
            if mistake == "after a break":
                run.step(losses.sum())
        except TrainError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("outside", "there is no batch"),
        ("a loss a sample", 'reduction="sum"'),
        ("a mean", "this is their mean"),
        ("a number", "not a float"),
        ("detached", "was detached"),
        ("twice", "step was called twice"),
        ("no update", "call update()"),
        ("no step", "a batch's loss is missing"),
        ("swallowed", "caught an error of step"),
        ("swallowed, and more follow", "caught an error of step"),
        ("moved, and again", "caught an error of step"),
        ("after a break", "there is no batch"),
    ],
)
def test_a_loop_that_leaves_something_out_is_told_what(gang, mistake, words):
    assert all(words in answer for answer in gang.run(mistaken, mistake))


def kept(rank: int, folder: str) -> str:
    """What is said of checkpoints with an optimiser that they cannot keep."""
    with in_the_gang(rank, checkpoint_every="3", checkpoint_dir=folder) as met:
        model = network()
        other = CustomScript(model, torch.optim.Adagrad(model.parameters()), Points(SAMPLES), default_collate)
        try:
            Session(assemble.prepare(met, other))
        except TrainError as error:
            return str(error)
    return "nothing"


def test_a_checkpoint_that_would_lose_what_an_optimiser_remembers_is_refused(gang, tmp_path):
    assert all("only, not that of Adagrad" in answer for answer in gang.run(kept, str(tmp_path)))


def test_what_is_no_data_set_or_no_optimiser_of_the_network_is_refused():
    model = network()
    with pytest.raises(TrainError, match="no map-style data set"):
        CustomScript(model, optimiser(model, 0.0), iter([1]), default_collate)
    with pytest.raises(TrainError, match="has no samples"):
        CustomScript(model, optimiser(model, 0.0), Points(0), default_collate)
    with pytest.raises(TrainError, match="not a str"):
        CustomScript("resnet18", optimiser(model, 0.0), Points(3), default_collate)
    with pytest.raises(
        TrainError, match=r"a single optimiser.*not a list: give one optimiser several groups of parameters"
    ):
        CustomScript(model, [optimiser(model, 0.0), optimiser(model, 0.0)], Points(3), default_collate)
    with pytest.warns(FutureWarning), pytest.raises(TrainError, match=r"cannot be copied \(0\.weight was computed"):
        CustomScript(
            nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 3))), optimiser(model, 0.0), Points(3), default_collate
        )
    other = CustomScript(model, optimiser(network(), 0.0), Points(3), default_collate)
    with pytest.raises(TrainError, match="make it of model"):
        other.optimizer(parse_settings("script", {}), model)


@pytest.mark.parametrize("is_function", [True, False])
def test_averaged_weights_are_exact_for_updates_that_add_up(is_function):
    model = network()
    adam = torch.optim.Adam if is_function else torch.optim.Adam(model.parameters())
    averages = {"strategy": "parameter_average"}
    with pytest.raises(TrainError, match="and Adam's do not; use ddp"):
        CustomScript(model, adam, Points(3), default_collate).optimizer(parse_settings("script", averages), model)
    assert CustomScript(model, adam, Points(3), default_collate).optimizer(
        parse_settings("script", {**averages, "fidelity": "local"}), model
    )
    with pytest.raises(TrainError, match="shares: auto changes the weight of each rank's momentum"):
        CustomScript(model, optimiser(model, 0.9), Points(3), default_collate).optimizer(
            parse_settings("script", {**averages, "shares": "auto"}), model
        )


def averaged(rank: int, asked: dict[str, str]) -> list[str]:
    """What is said of a moving average of the script's own, and which of its weights are not those of the network."""
    with in_the_gang(rank, steps="2", **asked) as met:
        model = network()
        model.insert(1, torch.nn.BatchNorm1d(8).double())
        own = CustomScript(model, optimiser(model, 0.0), Points(SAMPLES), default_collate)
        run = Session(assemble.prepare(met, own))
        try:
            average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda _, now, __: now)
        except TrainError as error:
            return [str(error)]
        run.after_update(lambda: average.update_parameters(model))
        for inputs, targets in run.batches():
            run.step(cross_entropy(run.model(inputs), targets, reduction="sum"))
        own_weights = dict(model.named_parameters())
        return [name for name, one in average.module.named_parameters() if not torch.equal(one, own_weights[name])]


@pytest.mark.parametrize("asked", [{"sync_bn": "true"}, {"strategy": "tensor"}])
def test_a_network_whose_ranks_meet_in_it_can_be_copied_for_an_average(gang, asked):
    assert gang.run(averaged, asked) == [[]] * RANKS


@pytest.mark.skipif(not NEWEST_FSDP, reason="fsdp needs a newer torch")
def test_a_copy_of_pieces_is_refused_in_a_line(gang):
    for (said,) in gang.run(averaged, {"strategy": "fsdp"}):
        assert said.startswith("strategy fsdp: Sequential cannot be copied") and "set ema=0.999" in said


def test_the_command_line_wins_over_the_script_which_wins_over_what_is_usual():
    with patch.dict("os.environ", {ASKED: json.dumps({"batch": "12", "amp": "bf16"})}):
        settings = parse_settings("script", asked_for({ASKED: '{"batch": "12"}'}), {"batch": 256, "epochs": 7})
    assert (settings.batch, settings.epochs, settings.strategy) == (12, 7, "ddp")
    for name, value in (("lr", "0.1"), ("model", "lenet"), ("data", "mnist"), ("samples", "10")):
        with pytest.raises(SettingsError, match=f"{name}: is decided by the script"):
            parse_settings("script", {name: value})
    for name, value, words in (("batch", "many", "not a whole number"), ("bacth", 3, "did you mean batch")):
        with pytest.raises(SettingsError, match=words):
            parse_settings("script", {}, {name: value})
    with pytest.raises(SettingsError, match="only for a script"):
        parse_settings("mnist_lenet", {"model": "own"})
    for wrong in ("[1]", "batch=3"):
        with pytest.raises(TrainError, match="no JSON object"):
            asked_for({ASKED: wrong})


def test_a_mean_is_told_from_a_sum_by_its_last_operation():
    outputs, labels = torch.ones(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    numbers = torch.zeros(4, 3)
    assert is_mean(cross_entropy(outputs, labels)) and is_mean(mse_loss(outputs, numbers)) and is_mean(outputs.mean())
    sums = cross_entropy(outputs, labels, reduction="sum"), mse_loss(outputs, numbers, reduction="sum"), outputs.sum()
    assert not any(map(is_mean, (*sums, cross_entropy(outputs, labels) * len(labels))))


def test_a_batch_of_any_form_is_cut_where_samples_end():
    batch = {"text": ["a", "b", "c"], "pair": (torch.arange(3), [torch.ones(3, 2), torch.zeros(3)])}
    first, second = pieces(batch, (1, 2))
    assert first["text"] == ["a"] and second["text"] == ["b", "c"]
    assert second["pair"][0].tolist() == [1, 2] and second["pair"][1][0].shape == (2, 2)
    assert isinstance(second["pair"], tuple) and isinstance(second["pair"][1], list)
    of_a_tokenizer = UserDict(input_ids=torch.arange(3))
    first, second = pieces(of_a_tokenizer, (1, 2))
    assert type(first) is UserDict and second["input_ids"].tolist() == [1, 2]
    assert moved(of_a_tokenizer, torch.device("meta"))["input_ids"].is_meta
    assert tensors_of(MappingProxyType({"x": torch.ones(2)})) and of_a_tokenizer["input_ids"].tolist() == [0, 1, 2]


def test_a_batch_whose_samples_cannot_be_seen_is_not_cut():
    hidden = SimpleNamespace(images=torch.ones(4, 2))
    assert [*pieces(hidden, (4,))] == [hidden]
    for batch in (hidden, (torch.ones(4), hidden)):
        with pytest.raises(TrainError, match="holds a SimpleNamespace: let `collate` give tensors"):
            list(pieces(batch, (2, 2)))


def test_the_package_names_what_a_script_needs_and_imports_torch_for_nothing_else():
    assert (trainer.join, trainer.Ranks, trainer.Session, trainer.TrainError) == (join, Ranks, Session, TrainError)
    with pytest.raises(AttributeError, match="no attribute 'jion'"):
        _ = trainer.jion
    assert "import torch" not in Path(trainer.__file__).read_text()
