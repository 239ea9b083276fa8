"""Ranks without samples: a share of 0, or the short last batch of most epochs. The update is that of one process,
whatever the network would make of a sample that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.support.gloo_ranks import RANKS, Gang
from tests.support.sums import NEWEST_FSDP
from tests.trainer.test_session import in_the_gang
from trainer.data import SampleStream
from trainer.session import Session
from trainer.setup import CustomScript, assemble
from trainer.shared import TrainError

SAMPLES, BATCH, EPOCHS = 97, 12, 2
"""The last batch of each epoch has one sample, for four ranks."""
NONE_FOR_3 = "node0=5,node1=4,node2=3,node3=0"
WAYS: dict[str, dict[str, str]] = {
    "ddp": {},
    "ddp, a share of 0": {"shares": NONE_FOR_3, "bucket_mib": "0.0001"},
    "micro-batches": {"shares": NONE_FOR_3, "accumulate": "2"},
    "after backward": {"shares": NONE_FOR_3, "strategy": "allreduce_flat"},
    "averaged weights": {"shares": NONE_FOR_3, "strategy": "parameter_average"},
    **(
        {
            "fsdp": {"strategy": "fsdp", "shares": NONE_FOR_3},
            "fsdp, micro-batches": {"strategy": "fsdp", "shares": NONE_FOR_3, "accumulate": "2"},
        }
        if NEWEST_FSDP
        else {}
    ),
}


class Heads(nn.Module):
    """What the networks below have in common: some layers behind what each makes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Logarithm(Heads):
    """Not finite at 0."""

    def forward(self, batch: Any) -> Tensor:
        return self.layers(torch.log(batch.abs()))


class Direction(Heads):
    def forward(self, batch: Any) -> Tensor:
        return self.layers(batch / batch.norm(dim=1, keepdim=True))


class Root(Heads):
    """Finite at 0, where the gradient of its first weights is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)

    def forward(self, batch: Any) -> Tensor:
        return self.layers(self.first(batch).square().sum(1, keepdim=True).sqrt().expand(-1, 6))


class Two(Heads):
    def forward(self, batch: Any, other: Tensor) -> Tensor:
        return self.layers(batch - other)


class Noting(Heads):
    """Keeps what it has seen, in a buffer and in attributes, and does not take less than one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0, 6, dtype=torch.float64), persistent=False)
        self.seen, self.sums, self.last = 0, [], torch.zeros(1)

    def forward(self, batch: Any) -> Tensor:
        if not len(batch):
            raise ValueError("no samples")
        if self.training:
            self.queue = torch.cat([self.queue, batch.detach()])
            self.seen += len(batch)
            self.sums += batch.sum(1).tolist()
            self.last += len(batch)
        return self.layers(batch.view(batch.shape[0], -1))


class Normed(Heads):
    """With a BatchNorm, and a form that none of torch's functions can find without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, batch: Any, other: Tensor) -> Tensor:
        return self.layers(self.norm(torch.log(batch.view(len(batch), -1).abs()) - other))


@dataclass(frozen=True)
class Kind:
    """A network, and how a loop's body calls it with a batch."""

    network: Callable[[], nn.Module]
    collate: Callable[[list[Any]], Any]
    call: Callable[[Any, Any], Tensor]
    labels: Callable[[Any], Tensor] = lambda batch: batch[1]
    samples: int = SAMPLES


def pair(samples: list[Any]) -> Any:
    return default_collate(samples)


def labels_first(samples: list[Any]) -> Any:
    points, labels = default_collate(samples)
    return labels, {"lengths": torch.full((len(samples),), 6), "points": points}, ["a name"] * len(samples)


def nested(samples: list[Any]) -> Any:
    points, labels = default_collate(samples)
    return {"x": {"points": points}, "label": labels}


def first_of(model: Any, batch: Any) -> Tensor:
    return model(batch[0])


def both_of(model: Any, batch: Any) -> Tensor:
    return model(batch[1]["points"], batch[1]["points"].flip(1) / batch[1]["lengths"][:, None])


def inner_of(model: Any, batch: Any) -> Tensor:
    return model(batch=batch["x"]["points"])


KINDS = {
    "BatchNorm": Kind(Normed, labels_first, both_of, lambda batch: batch[0], samples=98),  # it refuses one sample
    "log": Kind(Logarithm, pair, first_of),
    "norm": Kind(Direction, pair, first_of),
    "sqrt": Kind(Root, pair, first_of),
    "two inputs, labels first": Kind(Two, labels_first, both_of, lambda batch: batch[0]),
    "nested": Kind(Logarithm, nested, inner_of, lambda batch: batch["label"]),
    "noting": Kind(Noting, pair, first_of),
}


class Points:
    """Never 0."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.rand(6, generator=generator, dtype=torch.float64) + 0.5 + index % 3, index % 3


def network(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return KINDS[kind].network().double()


def loss_sum(kind: Kind, model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(kind.call(model, batch), kind.labels(batch), reduction="sum")


def optimiser(model: nn.Module, way: str) -> torch.optim.Optimizer:
    momentum = 0.0 if way == "averaged weights" else 0.9
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=0.01)


def one_process(kind: str, way: str) -> nn.Module:
    model, how = network(kind), KINDS[kind]
    data = Points(how.samples)
    optimizer = optimiser(model, way)
    stream = SampleStream(how.samples, BATCH, (BATCH,), seed=0)
    for epoch in range(EPOCHS):
        for step in range(stream.steps):
            batch = how.collate([data[index] for index in stream.indices(epoch, step, 0)])
            optimizer.zero_grad()
            (loss_sum(how, model, batch) / len(how.labels(batch))).backward()
            optimizer.step()
    return model


def trained(rank: int, case: tuple[str, str]) -> tuple[Tensor, float, bool, dict[str, Any]]:
    """The weights, the last epoch's loss, whether modes are as the script left them, and what the network has noted."""
    kind, way = case
    how = KINDS[kind]
    asked = {"batch": str(BATCH), "epochs": str(EPOCHS), "sync_bn": str(kind == "BatchNorm").lower(), **WAYS[way]}
    with in_the_gang(rank, **asked) as met:
        model = network(kind)
        model.layers[1].eval()
        run = Session(
            assemble.prepare(met, CustomScript(model, optimiser(model, way), Points(how.samples), how.collate))
        )
        for _ in run.epochs():
            for batch in run.batches():
                run.step(loss_sum(how, run.model, batch))
        run.end()
        modes = [module.training for module in model.modules()]
        whole = run.run.strategy.whole()
        weights = torch.cat([weight.detach().flatten() for weight in whole.parameters()])
        noted = {name: getattr(model, name, None) for name in ("queue", "seen", "sums", "last")}
        noted["statistics"] = [buffer.clone() for buffer in model.buffers()]
        assert run.loss is not None
        return weights, run.loss, modes.count(False) == 1 and not model.layers[1].training, noted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_without_samples_leave_the_update_of_one_process(gang: Gang, kind: str, way: str) -> None:
    if kind == "BatchNorm" and ("accumulate" in WAYS[way] or way == "averaged weights"):
        pytest.skip("sync_bn: refused")
    alone = one_process(kind, way)
    expected = torch.cat([weight.detach().flatten() for weight in alone.parameters()])
    begun = torch.cat([weight.detach().flatten() for weight in network(kind).parameters()])
    answers = gang.run(trained, (kind, way), timeout_s=60)
    for weights, loss, modes_kept, _ in answers:
        assert (weights - expected).norm() <= 1e-12 * (expected - begun).norm()
        assert loss == pytest.approx(answers[0][1], rel=1e-12) and loss == loss
        assert modes_kept
    if kind == "noting":  # each sample once, on whichever rank, and nothing else
        noted = [answer[3] for answer in answers]
        assert sum(one["seen"] for one in noted) == alone.seen == EPOCHS * SAMPLES
        assert sum(float(one["last"]) for one in noted) == EPOCHS * SAMPLES
        assert sorted(value for one in noted for value in one["sums"]) == pytest.approx(sorted(alone.sums))
        assert len(torch.cat([one["queue"] for one in noted])) == EPOCHS * SAMPLES
    if kind == "BatchNorm":
        for *_, one in answers:
            torch.testing.assert_close(one["statistics"], list(alone.buffers()), rtol=1e-12, atol=0)
    assert len(answers) == RANKS


class Words:
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([index % 7, index % 11]), index % 3


def of_words(rank: int, case: tuple[bool, dict[str, str]]) -> Tensor | str:
    is_sparse, asked = case
    with in_the_gang(rank, batch=str(BATCH), epochs=str(EPOCHS), **asked) as met:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Embedding(12, 6, sparse=is_sparse), nn.Flatten(), nn.Linear(12, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        try:
            run = Session(assemble.prepare(met, CustomScript(model, optimizer, Words(SAMPLES), default_collate)))
            for _ in run.epochs():
                for words, labels in run.batches():
                    run.step(nn.functional.cross_entropy(run.model(words), labels, reduction="sum"))
        except TrainError as error:
            return str(error)
        return torch.cat([weight.detach().flatten() for weight in run.run.strategy.whole().parameters()])


def test_ddp_takes_sparse_gradients_with_ranks_without_samples(gang: Gang) -> None:
    dense, sparse = (gang.run(of_words, (is_sparse, WAYS["ddp, a share of 0"])) for is_sparse in (False, True))
    for one, other in zip(dense, sparse, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("strategy", ["allreduce", "allreduce_flat", *(["fsdp"] if NEWEST_FSDP else [])])
def test_sparse_gradients_are_refused_by_name(gang: Gang, strategy: str) -> None:
    for answer in gang.run(of_words, (True, {"strategy": strategy})):
        assert isinstance(answer, str) and "sparse gradients (0.weight) travel with strategy ddp only" in answer
