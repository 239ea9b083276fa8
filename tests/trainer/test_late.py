"""`fidelity=late`: all stages but the last use weights that lack the update before, in both passes of an update."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.support.cpu_graphs import CpuGraph, cpu_graphs
from tests.support.gloo_ranks import Gang, group_of
from tests.support.pipeline_update import updated
from tests.trainer import test_pipeline
from tests.trainer.test_pipeline import (
    BLOCKS,
    Case,
    copied,
    network,
    optimiser,
    order,
    own_state,
    peers_of,
    samples,
    shapes,
    state_of,
)
from trainer.checkpoints.kept_state import fill
from trainer.compute.arithmetic import Full
from trainer.compute.timer import NO_DELAY, CpuTimer
from trainer.pipeline import Cuts, Layout, Pipeline, StageWork, part_of, replay_stage
from trainer.pipeline.late import LateWeights
from trainer.pipeline.stage import own_names
from trainer.shared import parse_stages
from trainer.strategies import GradientSum


@dataclass(frozen=True)
class LateCase(Case):
    """first: the first late update. drained: updates before which no forward begins early. resumed: before this update
    everything is made again from a checkpoint. copies: in place of LateWeights.
    """

    first: int = 1
    drained: frozenset[int] = frozenset()
    resumed: int = -1
    copies: type[LateWeights] = LateWeights


class CurrentWeights(LateWeights):
    """A mistake: no delay."""

    def weights_of(self, update: int) -> None:
        return None


class OneSet(LateWeights):
    """A mistake: the next update's weights overwrite this one's."""

    def begin(self, update: int) -> None:
        self.next = self.now
        super().begin(update)
        self.now = self.next


def delayed(case: LateCase) -> dict[str, Tensor]:
    """One process that computes with the weights of the update before, except on the last stage."""
    used, kept = network(case.dtype), network(case.dtype)
    steps = optimiser(kept)
    layout = Layout.of(parse_stages(case.stages), case.nodes, BLOCKS)
    exact = own_names(used, layout.pipelines[0][-1])
    before = {name: weight.detach().clone() for name, weight in kept.named_parameters()}
    losses = [0.0] * len(case.sizes)
    for update, sizes in enumerate(case.sizes):
        now = {name: weight.detach().clone() for name, weight in kept.named_parameters()}
        with torch.no_grad():
            for name, weight in used.named_parameters():
                weight.copy_(before[name] if update >= case.first and name not in exact else now[name])
        used.zero_grad()
        batch = sum(map(sum, sizes))
        images, labels = samples(update, batch, case.dtype)
        flat = [size for of_rank in sizes for size in of_rank]
        parts = list(zip(images.split(flat), labels.split(flat), strict=True))
        for part, targets in (parts[index] for index in order(layout, sizes)):
            loss_sum = cross_entropy(used(part), targets, reduction="sum")
            (loss_sum / batch).backward()
            losses[update] += loss_sum.item()
        for of_kept, of_used in zip(kept.parameters(), used.parameters(), strict=True):
            of_kept.grad = None if of_used.grad is None else of_used.grad.clone()
        steps.step()
        before = now
    statistics = {name: buffer.clone() for name, buffer in used.named_buffers()}
    return state_of(kept, losses, layout) | statistics


class LateRank:
    def __init__(self, rank: int, case: LateCase, layout: Layout, peers: Any) -> None:
        own, at, place = layout.stage(rank), shapes(), layout.place(rank)
        self.part = part_of(network(case.dtype), own)
        is_last = place.stage == len(layout.ranks[place.pipeline]) - 1
        cuts = Cuts(at[own.first - 1] if place.stage else None, None if is_last else at[own.last], case.dtype)
        stage = StageWork(self.part, Full(), reads=place.stage == 0, splits=case.splits)
        late = None if is_last else case.copies(dict(self.part.named_parameters()), case.first)
        sums, group = GradientSum(peers) if peers else None, group_of(len(case.nodes))
        self.pipeline = Pipeline(
            stage, layout, cuts, group, sums, CpuTimer(), NO_DELAY, in_flight=case.in_flight, late=late
        )
        self.steps = optimiser(self.part)
        self.notes: list[str] = []
        if case.graphs:
            replay_stage(stage, self.pipeline.in_flight, self.notes.append, self.notes.append)
            stage.forward, stage.backward = copied(stage.forward), copied(stage.backward)  # type: ignore[method-assign]

    def resumed(self, before: LateRank) -> LateRank:
        """With a checkpoint of the other one."""
        self.part.load_state_dict(before.part.state_dict())
        self.steps.load_state_dict(before.steps.state_dict())
        kept = {name: tensor.clone() for name, tensor in before.pipeline.own_state().items()}
        self.pipeline.expect(kept)
        assert fill(self.pipeline.own_state(), kept) == ""
        return self


def late(rank: int, case: LateCase) -> tuple[dict[str, Tensor], int] | None:
    """This rank's part of the network, and the number of forwards that were done early."""
    with cpu_graphs() if case.graphs else contextlib.nullcontext():
        return _late(rank, case)


def _late(rank: int, case: LateCase) -> tuple[dict[str, Tensor], int] | None:
    layout = Layout.of(parse_stages(case.stages), case.nodes, BLOCKS)
    peers = peers_of(layout, rank)
    if rank >= len(case.nodes):
        return None
    one, early, losses = LateRank(rank, case, layout, peers), 0, list[float]()

    def of_rank(update: int) -> dict[int, Any]:
        return dict(zip(layout.first_ranks, case.sizes[update], strict=True))

    def batch(update: int) -> tuple[Tensor, Tensor]:
        images, labels = samples(update, sum(map(sum, case.sizes[update])), case.dtype)
        counts = [sum(of_rank(update).get(other, ())) for other in range(len(case.nodes))]
        return images.split(counts)[rank], labels.split(counts)[rank]

    for update, sizes in enumerate(case.sizes):
        if update == case.resumed:
            one.pipeline.settle()
            one = LateRank(rank, case, layout, peers).resumed(one)
        ends = case.resumed if update < case.resumed else len(case.sizes)
        for number in range(update + len(one.pipeline.ahead), min(update + 2, ends)):
            one.pipeline.announce(of_rank(number))
        begins_next = case.first <= update + 1 < ends and update + 1 not in case.drained
        following = batch(update + 1) if begins_next else None
        one.steps.zero_grad()
        loss_sum, exchange = updated(one.pipeline, *batch(update), sum(map(sum, sizes)), update, following)
        early += len(exchange.early)
        losses.append(loss_sum.item())
        one.steps.step()
    one.pipeline.settle()
    if case.graphs:
        assert len([note for note in one.notes if "recorded" in note]) == (1 if one.pipeline.is_last else 3), one.notes
        assert not any("off a plain pass, two" in note for note in one.notes)
        micro_batches = sum(len(of) for sizes in case.sizes for of in sizes)
        assert CpuGraph.replays >= 2 * (micro_batches - 6), "plain: two updates, and the one before the first late one"
    found = state_of(one.part, losses, layout)
    return found if one.pipeline.is_last else own_state(found), early


def furthest(gang: Gang, case: LateCase, *, statistics: bool = True) -> float:
    """The largest difference between the ranks' weights and those of one process."""
    whole = delayed(case)
    found = [part for part in gang.run(late, case, timeout_s=120) if part is not None]
    assert set().union(*(part for part, _ in found)) == set(whole)
    return max(
        (tensor.double() - whole[name].double()).abs().max().item()
        for part, _ in found
        for name, tensor in part.items()
        if statistics or ("running" not in name and "tracked" not in name)
    )


TWO = LateCase("a:0-2,b:3-6", ("a", "b"), [[(8,)]] * 9 + [[(7,)]])
THREE = LateCase("a:0-1,b:2-4,c:5-6", ("a", "b", "c"), [[(4, 3, 4)]] * 6 + [[(4, 3)]])


@pytest.mark.parametrize("splits", [True, False], ids=["zero_bubble", "1f1b"])
@pytest.mark.parametrize("case", [TWO, THREE], ids=["two stages", "three stages"])
def test_updates_are_those_of_one_process_with_the_delay(gang: Gang, case: LateCase, splits: bool) -> None:
    assert furthest(gang, replace(case, splits=splits)) <= 1e-12


@pytest.mark.parametrize("splits", [True, False], ids=["zero_bubble", "1f1b"])
@pytest.mark.parametrize("case", [TWO, THREE], ids=["two stages", "three stages"])
def test_replayed_updates_are_those_of_one_process_with_the_delay(gang: Gang, case: LateCase, splits: bool) -> None:
    replayed = replace(case, sizes=[[(4, 4)]] * 12, first=5, splits=splits, graphs=True)
    assert furthest(gang, replayed) <= 1e-12


def test_the_delay_makes_a_difference(gang: Gang) -> None:
    exact = test_pipeline.alone(TWO)
    assert max((delayed(TWO)[name] - exact[name]).abs().max().item() for name in exact) > 1e-3


@pytest.mark.parametrize("first", [1, 2, 5, 10])
def test_the_first_updates_are_exact(gang: Gang, first: int) -> None:
    case = replace(TWO, first=first)
    assert furthest(gang, case) <= 1e-12
    if first == len(TWO.sizes):
        exact = test_pipeline.alone(TWO)
        assert all(torch.equal(weight, exact[name]) for name, weight in delayed(case).items())


def test_a_first_stage_begins_each_late_update_during_the_one_before(gang: Gang) -> None:
    (_, first), (_, last) = gang.run(late, replace(TWO, first=3, drained=frozenset([6])))[:2]
    assert (first, last) == (10 - 3 - 1, 0)


@pytest.mark.parametrize("resumed", [2, 3, 4, 6])
def test_a_resumed_run_has_the_same_weights_to_the_last_bit(gang: Gang, resumed: int) -> None:
    """In the exact phase, before its last update, before the first late update, and later."""
    case = replace(THREE, first=4)
    whole, parts = (gang.run(late, replace(case, resumed=number)) for number in (-1, resumed))
    for (found, _), (same, _) in zip(whole[:3], parts[:3], strict=True):
        assert all(torch.equal(tensor, same[name]) for name, tensor in found.items())
    assert furthest(gang, replace(case, resumed=resumed)) <= 1e-12


def test_current_weights_show(gang: Gang) -> None:
    every = frozenset(range(len(TWO.sizes)))
    assert furthest(gang, replace(TWO, drained=every)) <= 1e-12
    assert furthest(gang, replace(TWO, drained=every, copies=CurrentWeights)) > 1e-3


def test_weights_that_are_overwritten_during_an_update_show(gang: Gang) -> None:
    every = frozenset(range(len(TWO.sizes)))
    assert furthest(gang, replace(TWO, drained=every, copies=OneSet)) > 1e-3


def test_two_ranks_share_a_late_stage(gang: Gang) -> None:
    case = LateCase("a:0-2,b:3-6", ("a", "a", "b"), [[(3, 3), (4, 2)], [(2,), ()], [(3,), (4, 2)]] * 2)
    assert furthest(gang, case, statistics=False) <= 1e-12


def test_parallel_late_pipelines_add_up(gang: Gang) -> None:
    case = LateCase("a:0-2,b:3-6|c:0-2,d:3-6", ("a", "b", "c", "d"), [[(4, 4), (3, 2, 2)], [(5,), (2, 2)]] * 2)
    assert furthest(gang, case, statistics=False) <= 1e-12


@st.composite
def cases(draw: st.DrawFn) -> LateCase:
    one = draw(test_pipeline.cases())
    updates = range(len(one.sizes))
    return LateCase(
        **vars(one),
        first=draw(st.integers(1, len(one.sizes))),
        drained=frozenset(draw(st.sets(st.sampled_from(updates)))),
    )


@given(case=cases())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_every_cut_is_that_of_one_process_with_the_delay(gang: Gang, case: LateCase) -> None:
    assert furthest(gang, case) <= 1e-12


@pytest.mark.parametrize("is_old", [False, True], ids=["torch", "torch 2.0.1"])
def test_copies_follow_the_weights(is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_old:
        monkeypatch.delattr(torch, "_foreach_copy_", raising=False)
    layer = torch.nn.Linear(2, 1)
    copies = LateWeights(dict(layer.named_parameters()), first=1)
    for update in range(4):
        torch.nn.init.constant_(layer.weight, update)
        copies.begin(update)
        now, after = copies.weights_of(update), copies.weights_of(update + 1)
        assert after is not None and after["weight"].unique().item() == update
        assert update == 0 or (now is not None and now["weight"].unique().item() == update - 1)
