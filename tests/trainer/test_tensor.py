"""Layers cut over ranks: ten updates are those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.models.resnet import Bottleneck, ResNet

from tests.support.gloo_ranks import Gang, group_of
from trainer.checkpoints import kept_state
from trainer.compute.models import build_model
from trainer.compute.timer import NO_DELAY, CpuTimer
from trainer.strategies import GradientSum, local_loss
from trainer.tensor import Meeting, Sliced, SlicedParts, TensorParallel, cut, cut_channels, layers_of, survey

CLASSES = 3
SIDE = 13
SIZES = ((4, 3), (7,), (5, 2)) * 3 + ((3,),)
"""Micro-batches of each of ten updates, the last one short."""


class Small(ResNet):
    """torchvision's with bottlenecks, two of whose convolutions are grouped, and a sixteenth of its channels."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._norm_layer, self.inplanes, self.dilation, self.groups, self.base_width = nn.BatchNorm2d, 4, 1, 2, 64
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.layer1 = self._make_layer(Bottleneck, 2, 2)
        self.layer2 = self._make_layer(Bottleneck, 4, 1, stride=2)
        self.layer3, self.layer4 = nn.Identity(), nn.Identity()
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, CLASSES)


@dataclass(frozen=True)
class Case:
    """shares: each rank's part. heavier: a rank whose slice of one weight is moved before the first update. nodes: each
    rank's host, where some share one. travels: what numbers are rounded to on their way.
    """

    shares: Sequence[int]
    network: str = "small"
    dtype: torch.dtype = torch.float64
    heavier: int = -1
    nodes: Sequence[str] = ()
    travels: torch.dtype | None = None


def network(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return (Small() if case.network == "small" else build_model("lenet", (3, 32, 32), CLASSES)).to(case.dtype)


def samples(case: Case, update: int) -> tuple[Tensor, Tensor]:
    generator, side = torch.Generator().manual_seed(update), SIDE if case.network == "small" else 32
    count = sum(SIZES[update])
    images = torch.randn(count, 3, side, side, generator=generator, dtype=torch.float64).to(case.dtype)
    return images, torch.randint(CLASSES, (count,), generator=generator)


def optimiser(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def alone(case: Case) -> dict[str, Tensor]:
    model = network(case)
    steps = optimiser(model)
    for update, sizes in enumerate(SIZES):
        images, labels = samples(case, update)
        steps.zero_grad()
        for part, said in zip(images.split(sizes), labels.split(sizes), strict=True):
            (cross_entropy(model(part), said, reduction="sum") / len(labels)).backward()
        steps.step()
    return state_of(model, steps)


def state_of(model: nn.Module, steps: torch.optim.Optimizer) -> dict[str, Tensor]:
    """With the optimiser's, by name."""
    moved = {f"moved {n}": steps.state[p]["momentum_buffer"].detach().clone() for n, p in model.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()} | moved


def sliced(rank: int, case: Case) -> tuple[dict[str, Tensor], Any] | None:
    """This rank's slices after the same updates, and when it met the others in the last one."""
    if rank >= len(case.shares):
        return None
    model = network(case)
    with torch.device("meta"):
        whole, images = network(replace(case, dtype=torch.float32)), samples(replace(case, dtype=torch.float32), 0)[0]
    layers = layers_of(whole, images.to("meta"), case.shares)
    timer = CpuTimer()
    meeting = Meeting(GradientSum(group_of(len(case.shares)), case.nodes, case.travels), timer)
    strategy = TensorParallel(cut(model, layers, meeting), layers, meeting, timer, NO_DELAY)
    if rank == case.heavier:
        next(layer for layer in model.modules() if isinstance(layer, Sliced)).weight.data[0] += 0.01
    steps = optimiser(model)
    for update, sizes in enumerate(SIZES):
        images, labels = samples(case, update)
        steps.zero_grad()
        parts = list(zip(images.split(sizes), labels.split(sizes), strict=True))
        for part in parts[:-1]:
            strategy.accumulate(local_loss(strategy.model, *part), len(labels), len(labels))
        exchange = strategy.backward(local_loss(strategy.model, *parts[-1]), len(labels), len(labels))
        steps.step()
    return state_of(model, steps), exchange.waits


def furthest(gang: Gang, case: Case) -> float:
    """The largest difference between the ranks' slices, one after the other, and one process's network. What is not cut
    is the same on all ranks to the last bit. They meet once a layer forward, and backward but for the images.
    """
    whole = alone(case)
    answers = [answer for answer in gang.run(sliced, case, timeout_s=120) if answer]
    layers = sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in network(case).modules())
    assert [len(meetings) for _, meetings in answers] == [2 * layers - 1] * len(case.shares)
    states = [state for state, _ in answers]
    return max(difference([state[name] for state in states], tensor) for name, tensor in whole.items())


def difference(of_ranks: Sequence[Tensor], whole: Tensor) -> float:
    is_cut = sum(len(tensor) if tensor.dim() else 0 for tensor in of_ranks) == (len(whole) if whole.dim() else -1)
    assert is_cut or all(torch.equal(tensor, of_ranks[0]) for tensor in of_ranks)
    joined = torch.cat(list(of_ranks)) if is_cut else of_ranks[0]
    return (joined.double() - whole.double()).abs().max().item()


@pytest.mark.parametrize("name", ["small", "lenet"])
@pytest.mark.parametrize("shares", [(5, 2), (4, 1, 9), (1, 0, 2)])
def test_ten_updates_are_those_of_one_process(gang: Gang, shares: Sequence[int], name: str) -> None:
    """Of some layers a rank has no channel; of the last shares of none."""
    assert furthest(gang, Case(shares, name)) <= 1e-12


def test_single_precision_is_as_close(gang: Gang) -> None:
    assert furthest(gang, Case((5, 2), dtype=torch.float32)) <= 1e-5


def test_another_weight_in_one_slice_shows(gang: Gang) -> None:
    assert furthest(gang, Case((5, 2), heavier=1)) > 1e-3


def test_numbers_may_be_rounded_on_their_way(gang: Gang) -> None:
    """Ranks of one host add up among themselves first."""
    case = Case((3, 1, 2, 1), "lenet", torch.float32, nodes=("a", "b", "a", "b"), travels=torch.bfloat16)
    assert 1e-6 < furthest(gang, case) < 0.05


def test_a_whole_networks_state_is_joined_out_of_what_ranks_keep() -> None:
    """BatchNorm's is kept once, by the first rank, whatever the others have."""
    case = Case((5, 2, 0))
    whole = network(case)
    whole(samples(case, 0)[0])  # its statistics move
    with torch.device("meta"):
        skeleton = network(replace(case, dtype=torch.float64))
        layers = layers_of(network(Case((), dtype=torch.float32)), torch.zeros(2, 3, SIDE, SIDE), case.shares)
    of_ranks, state = SlicedParts(layers), whole.state_dict()
    momentum = {name: weight.detach() + 1 for name, weight in whole.named_parameters()}
    updates = {name: torch.tensor(float(number)) for number, name in enumerate(momentum)}
    kept = [
        of_ranks.kept(rank, state, skeleton)
        | {kept_state.remembered("avg", name): one for name, one in of_ranks.kept(rank, momentum, skeleton).items()}
        | {kept_state.remembered("step", name): one for name, one in of_ranks.kept(rank, updates, skeleton).items()}
        for rank in range(3)
    ]
    assert "bn1.running_mean" in kept[0] and "bn1.running_mean" not in kept[1]
    joined, moved = kept_state.joined(kept, of_ranks, skeleton)
    assert all(torch.equal(joined[name], tensor) for name, tensor in state.items())
    assert all(torch.equal(one, wanted) for one, wanted in zip(moved["avg"], momentum.values(), strict=True))
    assert [one.item() for one in moved["step"]] == [one.item() for one in updates.values()]


def test_channels_go_by_the_largest_remainder_and_groups_stay_whole() -> None:
    assert cut_channels(64, 1, (73, 183)).channels == (18, 46)
    assert cut_channels(3, 1, (1, 1, 9)).channels == (0, 0, 3)
    grouped = cut_channels(8, 4, (5, 2))
    assert (grouped.channels, grouped.groups, grouped.own(1)) == ((6, 2), (3, 1), (6, 2))


def test_resnet152_gathers_what_its_layers_give() -> None:
    layers = survey("resnet152", (3, 32, 32), 10, (1, 1))
    assert len(layers) == 156
    assert sum(torch.Size(layer.gives).numel() for layer in layers) == 460_298
    assert sum(torch.Size(layer.takes).numel() for layer in layers[1:]) == 450_048
    assert sum(layer.work for layer in layers) == pytest.approx(1)
