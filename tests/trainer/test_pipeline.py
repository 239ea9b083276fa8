"""A pipeline's update is that of one process which accumulates over the same micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.models.resnet import BasicBlock, ResNet

from tests.support.gloo_ranks import Gang, group_of
from trainer.compute.brake import NO_BRAKE
from trainer.compute.models import stages_of
from trainer.compute.precision import Full
from trainer.compute.timer import CpuTimer
from trainer.pipeline.cuts import Cuts
from trainer.pipeline.layout import Layout
from trainer.pipeline.part import part_of
from trainer.pipeline.stage import Stage
from trainer.pipeline.strategy import Pipeline
from trainer.shared.shares import equal_shares
from trainer.shared.stages import parse_stages
from trainer.strategies.gradient_sum import GradientSum

CPU = torch.device("cpu")
CLASSES = 3
UPDATES = 4


@dataclass(frozen=True)
class Case:
    """stages: as the setting has them. nodes: each rank's host. sizes: micro-batches of each first rank, an update."""

    stages: str
    nodes: Sequence[str]
    sizes: Sequence[Sequence[Sequence[int]]]
    dtype: torch.dtype = torch.float64
    splits: bool = True
    in_flight: int = 0
    heavier: int = -1


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
    return model.to(dtype)


BLOCKS = 6


def samples(update: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(update)
    images = torch.randn(count, 3, 33, 33, generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(CLASSES, (count,), generator=generator)


def optimiser(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def alone(case: Case) -> dict[str, Tensor]:
    """One process, which takes the micro-batches in the order of the first stage."""
    model = network(case.dtype)
    steps = optimiser(model)
    for update, sizes in enumerate(case.sizes):
        batch = sum(map(sum, sizes))
        images, labels = samples(update, batch, case.dtype)
        flat = [size for of_rank in sizes for size in of_rank]
        steps.zero_grad()
        for part, said in zip(images.split(flat), labels.split(flat), strict=True):
            (cross_entropy(model(part), said, reduction="sum") / batch).backward()
        steps.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def shapes() -> list[tuple[int, ...]]:
    model, found, activations = network(torch.float32).eval(), [], torch.zeros(1, 3, 33, 33)
    for block in stages_of(model):
        activations = block(activations)
        found.append(tuple(activations.shape[1:]))
    return found


def piped(rank: int, case: Case) -> dict[str, Tensor] | None:
    """The same over the ranks: this one's part of the network."""
    if rank >= len(case.nodes):
        return None
    layout = Layout.of(parse_stages(case.stages), case.nodes, BLOCKS)
    own, at = layout.stage(rank), shapes()
    part = part_of(network(case.dtype), own)
    place = layout.place(rank)
    is_last = place.stage == len(layout.ranks[place.pipeline]) - 1
    cuts = Cuts(at[own.first - 1] if place.stage else None, None if is_last else at[own.last], case.dtype)
    stage = Stage(part, Full(), reads=place.stage == 0, splits=case.splits)
    group = group_of(len(case.nodes))
    peers = layout.holders(own.first)
    sums = None
    if len(peers) == len(case.nodes):
        sums = GradientSum(group)
    pipeline = Pipeline(stage, layout, cuts, group, sums, CpuTimer(), NO_BRAKE, CPU, in_flight=case.in_flight)
    steps = optimiser(part)
    for update, sizes in enumerate(case.sizes):
        batch = sum(map(sum, sizes))
        images, labels = samples(update, batch, case.dtype)
        of_rank = dict(zip(layout.first_ranks, sizes, strict=True))
        counts = [sum(of_rank.get(other, ())) for other in range(len(case.nodes))]
        images, labels = images.split(counts)[rank], labels.split(counts)[rank]
        steps.zero_grad()
        pipeline.announce(of_rank)
        pipeline.update(images, labels, batch)
        steps.step()
    pipeline.settle()
    state = part.state_dict()
    return {name.removeprefix("whole."): tensor.detach().clone() for name, tensor in state.items()}


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Any:
    gang = Gang(tmp_path_factory.mktemp("gang"))
    yield gang
    gang.end()


def furthest(gang: Gang, case: Case, *, statistics: bool = True) -> float:
    """The largest difference between the ranks' weights and one process's."""
    whole = alone(case)
    found = [part for part in gang.run(piped, case, timeout_s=120) if part is not None]
    assert set().union(*found) == set(whole)
    return max(
        (tensor.double() - whole[name].double()).abs().max().item()
        for part in found
        for name, tensor in part.items()
        if statistics or ("running" not in name and "tracked" not in name)
    )


TWO = Case("a:0-2,b:3-5", ("a", "b"), [[(4, 4, 4, 4)]] * 3 + [[(4, 3)]])


def test_two_stages_make_the_update_of_one_process(gang: Gang) -> None:
    assert furthest(gang, TWO) == 0


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("cuts", [(0,), (4,), (1, 3), (0, 2, 4)])
def test_any_number_of_stages_does(gang: Gang, cuts: tuple[int, ...], splits: bool) -> None:
    ends = [*cuts, BLOCKS - 1]
    names = "abcd"[: len(ends)]
    begins = [0, *(cut + 1 for cut in cuts)]
    stages = ",".join(f"{n}:{b}-{e}" for n, b, e in zip(names, begins, ends, strict=True))
    case = Case(stages, tuple(names), [[equal_shares(14, 5)]] * UPDATES, splits=splits)
    assert furthest(gang, case) <= 1e-12
