"""A pipeline's update is that of one process which accumulates over the same micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.models.resnet import BasicBlock, ResNet

from tests.support.cpu_graphs import CpuGraph, cpu_graphs
from tests.support.gloo_ranks import Gang, group_of
from tests.support.pipeline_update import updated
from trainer.checkpoints import kept_state
from trainer.compute.arithmetic import Full
from trainer.compute.models import stages_of
from trainer.compute.timer import NO_DELAY, CpuTimer
from trainer.pipeline import Cuts, Layout, Pipeline, StageWork, part_of, replay_stage
from trainer.shared import Stage, micro_batch_sizes, parse_stages
from trainer.strategies import GradientSum

CLASSES = 3


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
    averages: bool = False
    graphs: bool = False


class Small(ResNet):
    """torchvision's, with a sixteenth of its channels."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._norm_layer, self.inplanes, self.dilation, self.groups, self.base_width = nn.BatchNorm2d, 4, 1, 1, 64
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.layer1 = self._make_layer(BasicBlock, 4, 2)
        self.layer2 = self._make_layer(BasicBlock, 8, 1, stride=2)
        self.layer3 = self._make_layer(BasicBlock, 16, 1, stride=2)
        self.layer4 = self._make_layer(BasicBlock, 16, 1)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, CLASSES)


BLOCKS = 7
SIDE = 13


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return Small().to(dtype)


def samples(update: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(update)
    images = torch.randn(count, 3, SIDE, SIDE, generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(CLASSES, (count,), generator=generator)


def optimiser(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def alone(case: Case) -> dict[str, Tensor]:
    """One process, which takes each update's micro-batches in the pipeline's order."""
    model = network(case.dtype)
    steps = optimiser(model)
    layout, losses = Layout.of(parse_stages(case.stages), case.nodes, BLOCKS), [0.0] * len(case.sizes)
    for update, sizes in enumerate(case.sizes):
        batch = sum(map(sum, sizes))
        images, labels = samples(update, batch, case.dtype)
        flat = [size for of_rank in sizes for size in of_rank]
        parts = list(zip(images.split(flat), labels.split(flat), strict=True))
        steps.zero_grad()
        for number, (part, said) in enumerate(parts[index] for index in order(layout, sizes)):
            factor = 2 if number == case.heavier else 1
            loss_sum = cross_entropy(model(part), said, reduction="sum")
            (factor * loss_sum / batch).backward()
            losses[update] += loss_sum.item()
        steps.step()
    return state_of(model, losses, layout)


def state_of(model: nn.Module, losses: Sequence[float], layout: Layout) -> dict[str, Tensor]:
    """With each update's loss if one rank has it."""
    of_updates = {"losses": torch.tensor(losses, dtype=torch.float64)} if len(last_ranks(layout)) == 1 else {}
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()} | of_updates


def own_state(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in found.items() if name != "losses"}


def last_ranks(layout: Layout) -> list[int]:
    return [rank for stages in layout.ranks for rank in stages[-1]]


def order(layout: Layout, sizes: Sequence[Sequence[int]]) -> list[int]:
    """Positions among all readers' micro-batches, one reader's after the other's, in the order of the routes."""
    begins = [sum(map(len, sizes[:reader])) for reader in range(len(sizes))]
    taken = [0] * len(sizes)
    found = []
    for number in range(len(layout.pipelines)):
        readers = layout.ranks[number][0]
        of_readers = {rank: sizes[layout.first_ranks.index(rank)] for rank in readers}
        for one in layout.routes(number, of_readers):
            reader = layout.first_ranks.index(one.ranks[0])
            found.append(begins[reader] + taken[reader])
            taken[reader] += 1
    return found


def shapes() -> list[tuple[int, ...]]:
    model, found, activations = network(torch.float32).eval(), [], torch.zeros(1, 3, SIDE, SIDE)
    for block in stages_of(model):
        activations = block(activations)
        found.append(tuple(activations.shape[1:]))
    return found


def piped(rank: int, case: Case) -> dict[str, Tensor] | None:
    """The same over the ranks: this one's part of the network."""
    with cpu_graphs() if case.graphs else contextlib.nullcontext():
        return _piped(rank, case)


def _piped(rank: int, case: Case) -> dict[str, Tensor] | None:
    layout = Layout.of(parse_stages(case.stages), case.nodes, BLOCKS)
    peers = peers_of(layout, rank)
    if rank >= len(case.nodes):
        return None
    own, at = layout.stage(rank), shapes()
    part = part_of(network(case.dtype), own)
    place = layout.place(rank)
    is_last = place.stage == len(layout.ranks[place.pipeline]) - 1
    cuts = Cuts(at[own.first - 1] if place.stage else None, None if is_last else at[own.last], case.dtype)
    stage = StageWork(part, Full(), reads=place.stage == 0, splits=case.splits)
    sums = GradientSum(peers) if peers else None
    group = group_of(len(case.nodes))
    pipeline = Pipeline(stage, layout, cuts, group, sums, CpuTimer(), NO_DELAY, in_flight=case.in_flight)
    steps = optimiser(part)
    notes, losses = list[str](), list[float]()
    if case.graphs:
        replay_stage(stage, pipeline.in_flight, notes.append, notes.append)
        stage.forward, stage.backward = copied(stage.forward), copied(stage.backward)  # type: ignore[method-assign]
    for update, sizes in enumerate(case.sizes):
        batch = sum(map(sum, sizes))
        images, labels = samples(update, batch, case.dtype)
        of_rank = dict(zip(layout.first_ranks, sizes, strict=True))
        counts = [sum(of_rank.get(other, ())) for other in range(len(case.nodes))]
        images, labels = images.split(counts)[rank], labels.split(counts)[rank]
        steps.zero_grad()
        pipeline.announce(of_rank)
        losses.append(updated(pipeline, images, labels, batch)[0].item())
        steps.step()
    pipeline.settle()
    if case.graphs:
        assert any("recorded" in note for note in notes) and not any("off a plain pass, two" in note for note in notes)
        recorded = [note.partition(" in flight")[0] for note in notes if "recorded" in note]
        assert len(recorded) == len(set(recorded)), notes
        assert CpuGraph.replays > sum(len(of) for sizes in case.sizes for of in sizes), notes
    if case.averages:
        pipeline.average_statistics(part, ())
    found = state_of(part, losses, layout)
    return found if is_last else own_state(found)


def copied(task: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """As on a GPU, where a tensor is copied to the host before the next task."""

    def of(*arguments: Any) -> Tensor | None:
        found = task(*arguments)
        return None if found is None else found.clone()

    return of


def peers_of(layout: Layout, rank: int) -> Any:
    """The group of the ranks that hold the same blocks, made by all of the gang."""
    found = None
    for held in zip(*layout.ranks, strict=True):
        ranks = sorted(one for lanes in held for one in lanes)
        if len(ranks) > 1:
            group = dist.new_group(ranks)
            found = group if rank in ranks else found
    return found


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


TWO = Case("a:0-2,b:3-6", ("a", "b"), [[(4, 4, 4, 4)]] * 9 + [[(4, 3)]])


def test_ten_updates_over_two_stages_are_those_of_one_process_to_the_last_bit(gang: Gang) -> None:
    assert furthest(gang, TWO) == 0


@pytest.mark.parametrize("splits", [False, True])
def test_replayed_stages_are_one_process_to_the_last_bit(gang: Gang, splits: bool) -> None:
    """Two sizes, several in flight, and plain passes in between."""
    sizes = [[(4, 4, 4, 4, 3, 3)]] * 6 + [[(2, 4, 4)]] + [[(4, 4, 4, 4, 3, 3)]] * 3
    assert furthest(gang, replace(TWO, sizes=sizes, splits=splits, graphs=True)) == 0


@pytest.mark.parametrize("graphs", [False, True])
def test_a_smaller_first_micro_batch_is_one_process_to_the_last_bit(gang: Gang, graphs: bool) -> None:
    """Three sizes, three others of an epoch's last batch, and each is recorded once."""
    full, last = [micro_batch_sizes(24, 6, 0.5)], [micro_batch_sizes(29, 5, 0.5)]
    assert (full, last) == ([(2, 5, 5, 4, 4, 4)], [(3, 7, 7, 6, 6)])
    of_updates = [full, last] * 5
    assert furthest(gang, replace(TWO, sizes=of_updates, graphs=graphs)) == 0


def test_a_micro_batch_that_counts_twice_shows(gang: Gang) -> None:
    assert furthest(gang, replace(TWO, heavier=1)) > 1e-3


def test_single_precision_is_as_close(gang: Gang) -> None:
    assert furthest(gang, replace(TWO, dtype=torch.float32)) <= 1e-5


@pytest.mark.parametrize("stages", ["a:0-2,b:3-6", "b:0-2,a:3-6"])
def test_two_ranks_share_a_stage(gang: Gang, stages: str) -> None:
    """Each with BatchNorm statistics of its own: the mean is judged elsewhere. Of the second update one has nothing."""
    readers = [[(3, 3), (4, 2)], [(2,), ()]] if stages.startswith("a") else [[(3, 3, 4, 2)], [(2,)]]
    case = Case(stages, ("a", "a", "b"), readers * 2)
    assert furthest(gang, case, statistics=False) <= 1e-12


def test_two_pipelines_beside_each_other_add_up(gang: Gang) -> None:
    case = Case("a:0-2,b:3-6|c:0-2,d:3-6", ("a", "b", "c", "d"), [[(4, 4), (3, 2, 2)], [(5,), (2, 2)]])
    assert furthest(gang, case, statistics=False) <= 1e-12


def test_statistics_of_ranks_that_share_a_stage_are_averaged_by_all_their_samples(gang: Gang) -> None:
    """The last update has nothing for one of them, whose statistics are as good as the other's."""
    case = Case("a:0-2,b:3-6", ("a", "a", "b"), [[(4,), (2,)], [(2,), ()]])
    (first, second, *_), (averaged, same, *_) = (gang.run(piped, replace(case, averages=on)) for on in (False, True))
    counts = 0.9 * 4 + 2, 0.9 * 2
    for name in (name for name in first if "running" in name):
        mean = (counts[0] * first[name] + counts[1] * second[name]) / sum(counts)
        assert torch.allclose(averaged[name], mean) and torch.equal(averaged[name], same[name])
        assert not torch.allclose(first[name], mean)


def test_a_part_takes_its_state_out_of_a_whole_networks() -> None:
    whole = network(torch.float64)
    whole(samples(0, 8, torch.float64)[0])  # its statistics move
    torch.manual_seed(4)
    for stage in (Stage("a", 0, 2), Stage("b", 3, 6)):
        part = part_of(Small().double(), stage)
        kept_state.take(part, whole.state_dict())
        taken = part.state_dict()
        assert any("running_mean" in name for name in taken)
        assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in taken.items())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    cuts = sorted(draw(st.sets(st.integers(0, BLOCKS - 2), min_size=1, max_size=3)))
    names = draw(st.permutations("abcd"[: len(cuts) + 1]))
    ends, begins = [*cuts, BLOCKS - 1], [0, *(cut + 1 for cut in cuts)]
    stages = ",".join(f"{n}:{b}-{e}" for n, b, e in zip(names, begins, ends, strict=True))
    sizes = st.lists(st.integers(2, 4), min_size=1, max_size=5).map(tuple)
    return Case(
        stages,
        tuple(sorted(names)),
        draw(st.lists(sizes.map(lambda one: [one]), min_size=2, max_size=3)),
        splits=draw(st.booleans()),
        in_flight=draw(st.integers(0, 4)),
    )


@given(case=cases())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_every_cut_in_any_order_of_hosts_is_exact(gang: Gang, case: Case) -> None:
    assert furthest(gang, case) <= 1e-12
