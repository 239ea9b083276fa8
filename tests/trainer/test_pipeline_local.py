"""Pipelines beside each other that average their weights: networks trained one by one and averaged by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.support.gloo_ranks import Gang, group_of
from tests.support.pipeline_update import updated
from tests.trainer.test_pipeline import BLOCKS, network, optimiser, samples, shapes
from trainer.compute.arithmetic import Full
from trainer.compute.batch_norm_kernels import estimate_running_statistics
from trainer.compute.timer import NO_DELAY, CpuTimer
from trainer.pipeline import Cuts, Layout, Pipeline, StageWork, part_of
from trainer.shared import SettingsError, parse_settings, parse_stages
from trainer.strategies import GradientSum, ParameterAverage

UPDATES = 7


@dataclass(frozen=True)
class Case:
    """sizes: micro-batches of each first rank. every: updates to an average."""

    stages: str
    nodes: Sequence[str]
    sizes: Sequence[Sequence[int]]
    every: int
    heavier: int = 0
    """Samples more than it has for which the first pipeline counts."""


TWO = Case("a:0-2,b:3-6|c:0-2,d:3-6", "abcd", [(4, 4), (3, 2)], every=3)
LANES = Case("a:0-6|b:0-6", "aabb", [(4,), (3,), (2, 2), (3,)], every=2)


def by_hand(case: Case) -> dict[str, Tensor]:
    """The mean of the weights after UPDATES, and the statistics that the last update's micro-batches have of it."""
    layout = Layout.of(parse_stages(case.stages), case.nodes, BLOCKS)
    readers = [[layout.first_ranks.index(rank) for rank in ranks[0]] for ranks in layout.ranks]
    counts = [sum(sum(case.sizes[reader]) for reader in of_one) for of_one in readers]
    shared = {name: tensor.detach().clone() for name, tensor in network(torch.float64).named_parameters()}
    models = [network(torch.float64) for _ in layout.pipelines]
    steps = [optimiser(model) for model in models]
    for update in range(UPDATES):
        parts = drawn(case, update)
        for model, step, of_one, count in zip(models, steps, readers, counts, strict=True):
            step.zero_grad()
            for images, labels in (pair for reader in of_one for pair in parts[reader]):
                (cross_entropy(model(images), labels, reduction="sum") / count).backward()
            step.step()
        if (update + 1) % case.every == 0:
            shared = mean_of(models, counts)
            for model in models:
                model.load_state_dict(shared, strict=False)
    whole = network(torch.float64)
    whole.load_state_dict(mean_of(models, counts), strict=False)
    estimate_running_statistics(whole, [images for of_one in drawn(case, 0) for images, _ in of_one])
    return whole.state_dict()


def mean_of(models: Sequence[nn.Module], counts: Sequence[int]) -> dict[str, Tensor]:
    of_all = [dict(model.named_parameters()) for model in models]
    return {
        name: sum(count * one[name].detach() for count, one in zip(counts, of_all, strict=True)) / sum(counts)
        for name in of_all[0]
    }


def drawn(case: Case, update: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Micro-batches of each first rank."""
    counts = [sum(sizes) for sizes in case.sizes]
    images, labels = samples(update, sum(counts), torch.float64)
    of_ranks = zip(images.split(counts), labels.split(counts), case.sizes, strict=True)
    return [list(zip(some.split(sizes), said.split(sizes), strict=True)) for some, said, sizes in of_ranks]


def averaged(rank: int, case: Case) -> dict[str, Tensor]:
    """This rank's part of what all share in the end; it has trained as if nobody had looked before."""
    layout = Layout.of(parse_stages(case.stages), case.nodes, BLOCKS)
    own, place, at = layout.stage(rank), layout.place(rank), shapes()
    stages = layout.ranks[place.pipeline]
    peers, lanes = holders(layout, rank), stages[place.stage]
    is_last = place.stage == len(stages) - 1
    part = part_of(network(torch.float64), own)
    cuts = Cuts(at[own.first - 1] if place.stage else None, None if is_last else at[own.last], torch.float64)
    averages = ParameterAverage(part, GradientSum(peers[0]), CpuTimer(), NO_DELAY, case.every)
    pipeline = Pipeline(
        StageWork(part, Full(), reads=place.stage == 0, splits=True),
        layout,
        cuts,
        group_of(len(case.nodes)),
        GradientSum(peers[1]) if len(lanes) > 1 else None,
        CpuTimer(),
        NO_DELAY,
        in_flight=0,
        averages=averages,
    )
    steps = optimiser(part)
    nothing = torch.empty(0, 3, 1, 1, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    for update in range(UPDATES):
        mine = drawn(case, update)[layout.first_ranks.index(rank)] if rank in layout.first_ranks else [nothing]
        images, labels = (torch.cat(each) for each in zip(*mine, strict=True))
        readers = [one for one in layout.first_ranks if layout.place(one).pipeline == place.pipeline]
        pipeline.announce({one: case.sizes[layout.first_ranks.index(one)] for one in readers})
        steps.zero_grad()
        averages.samples += case.heavier * (place.pipeline == 0)
        updated(pipeline, images, labels, sum(map(sum, case.sizes)))
        steps.step()
        pipeline.after_update()
        pipeline.whole()  # a look changes nothing
    first = drawn(case, 0)[layout.first_ranks.index(rank)] if rank in layout.first_ranks else []
    whole = pipeline.whole()
    pipeline.average_statistics(whole, [images for images, _ in first])
    pipeline.settle()
    return {name: tensor.detach().clone() for name, tensor in whole.state_dict().items()}


def holders(layout: Layout, rank: int) -> tuple[Any, Any]:
    """Groups of all ranks that hold the same blocks, and of those among them that belong to one pipeline."""
    made = [sorted(one for lanes in held for one in lanes) for held in zip(*layout.ranks, strict=True)]
    made += [sorted(lanes) for stages in layout.ranks for lanes in stages]
    of_all, own = (group for group, ranks in [(dist.new_group(ranks), ranks) for ranks in made] if rank in ranks)
    return of_all, own


def furthest(gang: Gang, case: Case, statistics: bool = True) -> float:
    whole = by_hand(case)
    found = gang.run(averaged, case, timeout_s=120)
    assert set().union(*found) == set(whole)
    return max(
        (tensor - whole[name]).abs().max().item()
        for part in found
        for name, tensor in part.items()
        if "tracked" not in name and (statistics or "running" not in name)
    )


@pytest.mark.parametrize("case", [TWO, LANES, replace(TWO, every=1)], ids=["two stages", "lanes", "every update"])
def test_the_mean_is_that_of_networks_trained_by_themselves(gang: Gang, case: Case) -> None:
    """In mid-round too, with BatchNorm statistics of its own: estimated again over the pipelines."""
    assert furthest(gang, case, statistics=case.every > 1) <= 1e-12


def test_a_pipeline_that_counts_for_too_much_shows(gang: Gang) -> None:
    assert furthest(gang, replace(TWO, heavier=1)) > 1e-3


SAID = {
    "stages=node0:0,node1:1": "fidelity=local: averages several pipelines",
    "local_batch=4": "local_batch: a pipeline's micro-batches make one update",
    "local_after=5": "local_after: pipelines average from the first update",
    "amp=fp16": "amp: fp16 skips updates that overflow",
}


@pytest.mark.parametrize("asked", SAID)
def test_what_pipelines_cannot_do_by_themselves_is_said(asked: str) -> None:
    pairs = {"strategy": "pipeline", "fidelity": "local", "stages": "a:0,b:1|c:0,d:1"}
    parse_settings("mnist_lenet", pairs)
    name, _, value = asked.partition("=")
    with pytest.raises(SettingsError, match=SAID[asked]):
        parse_settings("mnist_lenet", {**pairs, name: value})
