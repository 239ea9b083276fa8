"""Every way to synchronise takes the steps of one process with the whole batch, over real Gloo, for any shares."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.gloo_ranks import RANKS, Gang, group_of
from tests.support.sums import (
    EXAMPLE,
    GRADIENTS,
    HAS_HOROVOD,
    NEWEST_FSDP,
    PLAIN,
    TENTH,
    UPDATES,
    Case,
    data_of,
    distances,
    loss_of,
    network,
    settings_for,
    train,
    vector,
    worst,
)
from tests.support.trainer_ranks import of_event, trained
from trainer.compute import arithmetic
from trainer.compute.arithmetic import build_precision
from trainer.compute.models import build_model, gradient_bytes
from trainer.compute.timer import CpuTimer, InjectedDelay
from trainer.setup import check_batch_norm
from trainer.shared import AFTER_BACKWARD, STRATEGIES, SettingsError, Slow, TrainError, parse_settings
from trainer.strategies import build_strategy, fsdp, local_loss, no_loss, synchronise_batch_norm, whole_batch_statistics

EVERY = (*GRADIENTS, "parameter_average")
EXAMPLES = int(os.environ.get("ORCH_EQUALITY_EXAMPLES", "10"))
BOUND = {"float64": 1e-12, "float32": 1e-5}
CPU = torch.device("cpu")


@st.composite
def cases(draw: st.DrawFn, batch_norm: bool) -> Case:
    shares = draw(st.lists(st.integers(0, 6), min_size=1, max_size=RANKS).filter(lambda shares: sum(shares) >= 4))
    return Case(
        shares=tuple(shares),
        last=draw(st.integers(2 if batch_norm else 1, sum(shares))),
        steps=draw(st.integers(2, 6)),
        seed=draw(st.integers(0, 1000)),
        channels=draw(st.integers(1, 3)),
        side=draw(st.integers(3, 6)),
        dtype=draw(st.sampled_from(list(BOUND))),
        batch_norm=batch_norm,
    )


property_of_equality = settings(
    max_examples=EXAMPLES,
    derandomize=EXAMPLES < 100,  # a long run is there to find what is new
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],  # to shrink a failure would take minutes, and tell little more
)


@property_of_equality
@given(case=cases(batch_norm=False))
@example(case=EXAMPLE)
def test_any_shares_give_the_update_of_one_process(gang: Gang, case: Case) -> None:
    found = worst(gang, case)
    assert all(distance <= BOUND[case.dtype] for distance in found.values()), found


@property_of_equality
@given(case=cases(batch_norm=True))
@example(case=replace(EXAMPLE, batch_norm=True))
@example(case=replace(EXAMPLE, batch_norm=True, dtype="float32"))
def test_with_a_batch_norm_over_all_ranks_too(gang: Gang, case: Case) -> None:
    found = worst(gang, case)
    assert all(distance <= BOUND[case.dtype] for distance in found.values()), found


def test_ranks_that_all_count_alike_give_another_update(gang: Gang) -> None:
    found = worst(gang, replace(EXAMPLE, weight=False))
    assert all(distance > 0.01 for distance in found.values()), found
    assert max(worst(gang, replace(EXAMPLE, shares=(2, 2, 2), last=0, weight=False)).values()) <= 1e-12


def test_weights_averaged_after_every_update_of_plain_sgd_are_the_exact_ones(gang: Gang) -> None:
    case = replace(EXAMPLE, strategies=("parameter_average",), optimizer=PLAIN)
    assert worst(gang, case)["parameter_average"] <= 1e-12
    assert worst(gang, replace(case, local_steps=2))["parameter_average"] > 1e-6


def averaged_and_expected(rank: int, case: Case) -> float:
    """Ten updates, averaged after three, six, nine, and at the end; beside the same in one process, rank by rank.

    A mean is taken over where it was made, or `local_overlap` updates later, with what each rank came since on top.
    """
    group, every, overlap = group_of(len(case.shares)), case.local_steps, int(dict(case.asked)["local_overlap"])
    trained = train(case, "parameter_average", group, rank, seed=rank)
    start, samples = trained.before, [0] * len(case.shares)
    left, mean = list[torch.Tensor](), start  # the weights of which a mean is under way
    networks = [network(case, 0) for _ in case.shares]
    optimizers = [torch.optim.SGD(model.parameters(), **TENTH) for model in networks]
    images, labels = data_of(case)
    for update in range(UPDATES):
        epoch, step = divmod(update, case.stream.steps)
        for number, (model, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            own = case.stream.indices(epoch, step, number)
            optimizer.zero_grad()
            loss = local_loss(model, images[own], labels[own]) if own else no_loss(model)
            (loss / max(1, len(own))).backward()
            optimizer.step()
            samples[number] += len(own)
        done, is_last = update + 1, update + 1 == UPDATES
        if left and (done % every == overlap or is_last):
            start = take_over(mean, left, networks)
        if done % every == 0 or is_last:
            left = [vector(model) for model in networks]
            ways = [(own - start) * (count / sum(samples)) for own, count in zip(left, samples, strict=True)]
            mean, samples = start + sum(ways), [0] * len(case.shares)
        if left and (not overlap or is_last):
            start = take_over(mean, left, networks)
    return float((trained.after - start).norm() / (trained.after - trained.before).norm())


def take_over(mean: torch.Tensor, left: list[torch.Tensor], networks: Sequence[nn.Module]) -> torch.Tensor:
    for model, own in zip(networks, left, strict=True):
        nn.utils.vector_to_parameters(vector(model) + mean - own, model.parameters())
    left.clear()
    return mean


@pytest.mark.parametrize("overlap", ["0", "1", "2"])
def test_an_average_counts_each_rank_by_its_samples_since_the_last_one(gang: Gang, overlap: str) -> None:
    case = replace(EXAMPLE, local_steps=3, asked=(("local_overlap", overlap),))
    assert max(gang.run(averaged_and_expected, case)) <= 1e-12


def without_gloos_reduce_scatter(rank: int, case: Case) -> Any:
    missing = RuntimeError("ProcessGroupGloo does not support reduce_scatter")
    with patch.object(dist, "reduce_scatter_tensor", side_effect=missing):
        return distances(rank, case)


def test_reduce_scatter_does_without_gloos_own_where_torch_is_older(gang: Gang) -> None:
    answers = gang.run(without_gloos_reduce_scatter, replace(EXAMPLE, strategies=("reduce_scatter",)))
    assert max(answer["reduce_scatter"][0] for answer in answers) <= 1e-12


def variance_far_from_zero(rank: int, shares: tuple[int, ...]) -> float:
    """The relative error of float32's variance where the mean is a thousand times larger than the spread."""
    values = torch.randn((sum(shares), 1, 50), generator=torch.Generator().manual_seed(1)) + 1000
    own = values.split(shares)[rank]
    _, _, variance = whole_batch_statistics(own, group_of(RANKS))
    exact = values.double().var(correction=0)
    return float((variance.double() - exact).abs() / exact)


def test_the_variance_over_all_ranks_survives_a_large_mean(gang: Gang) -> None:
    assert max(gang.run(variance_far_from_zero, (4, 0, 2, 1))) < 1e-5


def statistics_in_eval_mode(rank: int, case: Case) -> bool:
    """Rank 0 alone calls the network in eval mode: it would wait for the others for ever if it asked them."""
    model = network(case, 0)
    synchronise_batch_norm(model, group_of(RANKS))
    plain = network(case, 0).eval()
    model.load_state_dict(plain.state_dict())
    images = data_of(case)[0][:3]
    return rank > 0 or torch.equal(model.eval()(images), plain(images))


def test_in_eval_mode_a_batch_norm_over_all_ranks_is_a_plain_one(gang: Gang) -> None:
    assert all(gang.run(statistics_in_eval_mode, replace(EXAMPLE, batch_norm=True)))


def one_update(rank: int, asked: tuple[str, str, bool]) -> tuple[float, bool, float]:
    """(strategy, amp, does it overflow): how far the update is from that in 32 bits, or its size where it overflows;
    is it the same on all ranks; and the scale that the next loss will have.
    """
    name, amp, overflow = asked
    case, group, updates = replace(EXAMPLE, shares=(4, 0, 2, 2), dtype="float32"), group_of(RANKS), []
    images, labels = data_of(case)
    own = case.stream.indices(0, 0, rank)
    if overflow and rank == 2:
        images *= float("inf")
    for mode in ("none", amp):
        model = network(case, 0)
        strategy = build_strategy(settings_for(case, name), model, group, CpuTimer())
        numbers = build_precision(mode, CPU, group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = vector(strategy.whole())
        for _ in range(1 if overflow else 3):  # the scale may begin too high
            optimizer.zero_grad()
            with numbers.autocast(), loss_of(strategy, model, images[own], labels[own]) as loss:
                strategy.backward(numbers.scaled(loss), len(own), 8)
            numbers.unscale(optimizer)
            numbers.step(optimizer)
            strategy.after_update()
            update = vector(strategy.whole()) - before
            if update.any():
                break
        updates.append(update)
    firsts = updates[1].clone()
    dist.broadcast(firsts, src=0, group=group)
    change = updates[1] if overflow else (updates[1] - updates[0]) / updates[0].norm()
    scale = numbers.scaler.get_scale() if amp == "fp16" else 1.0
    return float(change.norm()), torch.equal(firsts, updates[1]), scale


def skip_unless_computes_in(amp: str) -> None:
    try:
        build_precision(amp, CPU, dist.group.WORLD)
    except TrainError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_16_bits_give_about_the_same_update(gang: Gang, amp: str) -> None:
    skip_unless_computes_in(amp)
    for name in EVERY:
        for distance, is_same, _ in gang.run(one_update, (name, amp, False)):
            assert distance < 0.03, name
            assert is_same, name


def test_an_update_that_overflows_on_one_rank_is_left_out_on_all(gang: Gang) -> None:
    skip_unless_computes_in("fp16")
    for name in EVERY:
        assert gang.run(one_update, (name, "fp16", True)) == [(0.0, True, 2.0**15)] * RANKS, name


def test_16_bits_are_refused_where_torch_only_warns() -> None:
    with patch.object(arithmetic, "_computes_in", return_value=False), pytest.raises(TrainError) as refused:
        build_precision("fp16", CPU, dist.group.WORLD)
    assert (
        str(refused.value)
        == f"amp fp16: torch {torch.__version__} cannot compute in fp16 on cpu; use amp=none or a GPU"
    )


def refusal(rank: int, name: str) -> str:
    case = replace(EXAMPLE, dtype="float32")
    try:
        with patch.object(torch.distributed.fsdp, "FSDPModule", object, create=True):
            build_strategy(settings_for(case, name), network(case, 0), group_of(RANKS), CpuTimer())
    except TrainError as error:
        return str(error)
    return "no failure"


@pytest.mark.parametrize("name", ["none", "dp"])
def test_several_ranks_without_synchronisation_are_refused(gang: Gang, name: str) -> None:
    message = f"strategy {name} is for a single process, but there are 4 ranks: use ddp or allreduce"
    assert gang.run(refusal, name) == [message] * RANKS


def test_fsdp_says_which_torch_it_needs(gang: Gang) -> None:
    message = f"strategy fsdp needs torch 2.9 or newer, this is {torch.__version__}: use ddp"
    assert gang.run(refusal, "fsdp") == [message] * RANKS


def test_fsdp_holds_each_weight_once(gang: Gang) -> None:
    if not NEWEST_FSDP:
        pytest.skip("needs torch 2.9")
    held, whole = zip(*gang.run(weights_held, EXAMPLE), strict=True)
    assert sum(held) == whole[0] == whole[3]


def weights_held(_: int, case: Case) -> tuple[int, int]:
    strategy = build_strategy(settings_for(case, "fsdp"), network(case, 0), group_of(RANKS), CpuTimer())
    own = sum(parameter.to_local().numel() for parameter in strategy.model.parameters())
    return own, sum(parameter.numel() for parameter in strategy.whole().parameters())


def test_fsdp_joins_small_neighbours_up_to_the_size_of_a_piece() -> None:
    with torch.device("meta"):
        model = build_model("resnet152", (3, 32, 32), 10)
    pieces = list(fsdp.pieces_of(model, 25 * 2**20))
    sizes = [sum(map(gradient_bytes, piece)) for piece in pieces]
    assert sum(sizes) == gradient_bytes(model)
    assert max(sizes) <= 25 * 2**20
    assert all(sum(two) > 25 * 2**20 for two in itertools.pairwise(sizes)), "two of them would have been one"
    named = {module: name for name, module in model.named_modules()}
    names = [named[part] for piece in pieces for part in piece]
    assert (names[:4], names[-1], len(pieces)) == (["conv1", "bn1", "layer1", "layer2"], "fc", 11)


@pytest.mark.parametrize("strategy", ["parameter_average", "dp"])
def test_a_batch_norm_over_all_ranks_is_refused_where_there_is_no_whole_batch(strategy: str) -> None:
    with pytest.raises(SettingsError, match=f"sync_bn: strategy {strategy} has no single network"):
        parse_settings("resnet152_cifar", {"strategy": strategy, "sync_bn": "true"})


def losses(strategy: str, folder: Path) -> list[float]:
    """Two updates of two ranks; the strategies begin with the same weights and see the same samples."""
    settings = {"exp": "mnist_lenet", "data": "synthetic", "device": "cpu", "samples": "128", "steps": "2"}
    settings |= {"eval_every": "0", "augment": "none", "momentum": "0", "strategy": strategy}
    (folder / strategy).mkdir()
    of_ranks = trained(folder / strategy, [f"--{name}={value}" for name, value in settings.items()], 2)
    return [line["loss"] for lines in of_ranks for line in of_event(lines, "step")]


def test_gradients_weights_and_shards_train_alike_in_a_run(tmp_path: Path) -> None:
    expected = losses("allreduce", tmp_path)
    assert len(expected) == 4
    for strategy in ("reduce_scatter", "parameter_average", *(["fsdp"] if NEWEST_FSDP else [])):
        assert losses(strategy, tmp_path) == pytest.approx(expected, rel=1e-5), strategy


def test_over_all_ranks_only_the_whole_batch_needs_two_samples() -> None:
    model, stream = network(replace(EXAMPLE, batch_norm=True), 0), EXAMPLE.stream
    with pytest.raises(TrainError, match="or sync_bn=true"):
        check_batch_norm(model, stream)
    check_batch_norm(model, stream, whole_batch=True)
    with pytest.raises(TrainError, match="of 1 samples"):
        check_batch_norm(model, replace(EXAMPLE, last=1).stream, whole_batch=True)


# ---- a rank that is held up before each call -------------------------------------------------------------------------

CALLS = {
    **{name: len(STRATEGIES[name].collectives) for name in AFTER_BACKWARD},
    "allreduce": 6,
    "ddp": 1,
    "parameter_average": 1,
    **({"horovod": 6} if HAS_HOROVOD else {}),
}
"""Of an exchange of six parameters; ddp's first update, before it cuts its buckets, has a single one."""
BESIDE_BACKWARD = ("ddp", "horovod", "parameter_average")
"""What holds a rank up there comes before its last gradient is handed over."""


def held_up(rank: int, name: str) -> tuple[list[str], float]:
    """Where rank 1 stood still in an update, and for how many seconds after its last gradient."""
    case = Case((2, 2, 2, 2))
    delay, places = InjectedDelay(Slow(1, "call", 4), rank, CpuTimer()), []

    def pause(place: str) -> float:
        seconds = InjectedDelay.pause(delay, place)
        places.extend([place] if seconds else [])
        return seconds

    delay.pause = pause
    strategy = build_strategy(settings_for(case, name), network(case, 0), group_of(RANKS), CpuTimer(), delay)
    images, labels = data_of(case)
    exchange = strategy.backward(local_loss(strategy.model, images[:2], labels[:2]), 2, 8)
    strategy.after_update()
    return places, exchange.held_up_s


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_is_held_up_before_each_call_of_the_exchange(gang: Gang, name: str) -> None:
    answers = gang.run(held_up, name)
    assert [places for places, _ in answers] == [[], ["call"] * CALLS[name], [], []]
    after_s = 0 if name in BESIDE_BACKWARD else CALLS[name] * 0.004
    assert [seconds for _, seconds in answers] == [0, pytest.approx(after_s), 0, 0]
