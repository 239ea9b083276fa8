"""What a run may lose on the wire, and what not: 16 bits, PowerSGD, local steps, sums inside hosts, over real Gloo."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from tests.support.gloo_ranks import RANKS, Gang, group_of
from tests.support.sums import (
    EXAMPLE,
    PLAIN,
    TENTH,
    UPDATES,
    Case,
    data_of,
    loss_of,
    network,
    settings_for,
    train,
    vector,
    worst,
)
from trainer.compute.timer import CpuTimer
from trainer.shared import SettingsError, TrainError, parse_settings
from trainer.strategies import (
    GradientSum,
    ParameterAverage,
    PowerSgd,
    averaging,
    build_strategy,
    fitted_bucket_bytes,
    local_loss,
)

SHAPES = ((6, 8), (5,), (6, 2, 4), (40, 30), (30, 10, 4))
HALF = 2**-8
"""bfloat16 keeps eight bits of a number."""


def asking(case: Case, *strategies: str, **settings: str) -> Case:
    return replace(case, strategies=strategies, asked=tuple(settings.items()))


@pytest.mark.parametrize(("wire", "bound"), [("auto", HALF), ("fp16", HALF / 8)])
def test_half_rounds_each_ranks_weighted_part(gang: Gang, wire: str, bound: float) -> None:
    found = worst(gang, asking(EXAMPLE, "ddp", "allreduce", "allreduce_flat", fidelity="half", wire=wire))
    assert all(1e-6 < distance < bound for distance in found.values()), found


def test_sums_inside_each_host_first_are_the_same_sums(gang: Gang) -> None:
    for nodes in (("a", "a", "b", "a"), ("a", "b", "b", "c")):
        found = worst(gang, replace(asking(EXAMPLE, "ddp", "allreduce_flat", bucket_mib="0.0001"), nodes=nodes))
        assert all(distance < 1e-12 for distance in found.values()), found
        half = worst(gang, replace(asking(EXAMPLE, "ddp", fidelity="half"), nodes=nodes))
        assert 1e-6 < half["ddp"] < 2 * HALF


def summed_in_16_bits(rank: int, values: list[float]) -> float:
    wire = GradientSum(group_of(RANKS), ["a", "a", "b", "b"], torch.bfloat16)
    tensor = torch.full((3,), values[rank])
    wire.sum(tensor)
    return float(tensor[0])


def test_a_hosts_sum_is_rounded_and_not_what_it_is_made_of(gang: Gang) -> None:
    values = [1 + HALF, HALF, 0.5, 0.25 + 2 * HALF]  # 1 + HALF by itself would become 1, and the sum less
    assert gang.run(summed_in_16_bits, values) == [1.75 + 4 * HALF] * RANKS


def relayed(rank: int, _: None) -> list[float]:
    """Thirty sums of other sizes, one of them in three pieces, all begun before the first is waited for."""
    wire = GradientSum(group_of(RANKS), ["a", "b", "b", "a"])
    tensors = [torch.full((1 + 997 * (number % 3),), float(rank * number)) for number in range(29)]
    tensors.append(torch.full((2 * wire.relay.piece + 1,), float(rank * 29)))
    sums = [future.wait() for future in [wire.begin(tensor) for tensor in tensors]]
    assert all(summed is tensor for summed, tensor in zip(sums, tensors, strict=True))
    return [float(summed.double().mean()) for summed in sums]


def test_many_sums_at_once_are_not_mixed_up(gang: Gang) -> None:
    assert gang.run(relayed, None) == [[6.0 * number for number in range(30)]] * RANKS


def with_a_lost_piece(_: int, __: None) -> str:
    wire, reduce, begun = GradientSum(group_of(RANKS), ["a", "b", "b", "a"]), dist.reduce, []

    def loses_the_second(*arguments: Any, **options: Any) -> Any:
        begun.append(arguments)
        if len(begun) == 2:
            raise RuntimeError("Connection closed by peer")
        return reduce(*arguments, **options)

    dist.reduce = loses_the_second
    try:
        wire.sum(torch.ones(3 * wire.relay.piece))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.reduce = reduce
    return "no failure"


def test_a_piece_that_is_lost_fails_the_sum(gang: Gang) -> None:
    assert all("Connection closed by peer" in error for error in gang.run(with_a_lost_piece, None))


class LostSum:
    """What `dist.all_reduce` gives back when the connection breaks on its way."""

    def get_future(self) -> Any:
        future = torch.futures.Future()
        future.set_exception(RuntimeError("Connection closed by peer"))
        return future


def with_a_lost_sum(_: int, __: None) -> str:
    wire = GradientSum(group_of(RANKS))
    with patch.object(dist, "all_reduce", return_value=LostSum()):
        try:
            wire.sum(torch.ones(3))
        except RuntimeError as error:
            return str(error)
    return "no failure"


def test_a_sum_that_is_lost_is_not_taken_for_one(gang: Gang) -> None:
    assert all("Connection closed by peer" in error for error in gang.run(with_a_lost_sum, None))


def fitted(_: int, __: None) -> int:
    return fitted_bucket_bytes(GradientSum(group_of(RANKS)), 232_000_000, torch.device("cpu"))


def test_buckets_fitted_to_the_link_are_the_same_on_all_ranks(gang: Gang) -> None:
    found = gang.run(fitted, None)
    assert len(set(found)) == 1
    assert 2**20 <= found[0] <= 2**28 and found[0] in {int(2 ** (power / 2)) for power in range(40, 57)}
    assert worst(gang, asking(EXAMPLE, "ddp", bucket_mib="0"))["ddp"] < 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# compressed


def gradients_of(rank: int, step: int, columns: int | None = None) -> list[torch.Tensor]:
    """Of one rank; columns: the rank of the SUM of all ranks' matrices, None for any."""
    common = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(1000 * step + rank)
    found = []
    for shape in SHAPES:
        rows, rest = shape[0], torch.Size(shape[1:]).numel()
        if columns is None or len(shape) == 1:
            matrix = torch.randn(rows, rest, generator=own, dtype=torch.float64)
        else:
            left = torch.randn(rows, columns, generator=common, dtype=torch.float64)
            matrix = left @ torch.randn(columns, rest, generator=own, dtype=torch.float64)
        found.append((matrix * (rank + 1) ** 2).view(shape))
    return found


def compressed_beside_exact(rank: int, columns: int | None) -> tuple[float, float, float]:
    """Of ten updates (one where gradients are thin): how far the last sum is from the exact one; how far all that was
    sent and all that is still remembered is from the exact sums; and how far the ranks are from rank 0.
    """
    wire = GradientSum(group_of(RANKS))
    exchange = PowerSgd(gradients_of(0, 0), rank=2)
    sent, exact = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    for step in range(1 if columns else 10):
        gradients = gradients_of(rank, step, columns)
        exchange(gradients, wire)
        truth = [sum(parts) for parts in zip(*(gradients_of(r, step, columns) for r in range(RANKS)), strict=True)]
        for total, one in (*zip(sent, gradients, strict=True), *zip(exact, truth, strict=True)):
            total += one
    last = max(float((g - t).norm() / t.norm()) for g, t in zip(gradients, truth, strict=True))
    assert [stack.positions for stack in exchange.stacks] == [(0, 2), (3,), (4,)]
    for stack in exchange.stacks:
        dist.all_reduce(stack.memory, group=wire.group)
        for matrix, position in zip(stack.memory, stack.positions, strict=True):
            sent[position] += matrix.view(SHAPES[position])
    kept = max(float((s - e).norm() / e.norm()) for s, e in zip(sent, exact, strict=True))
    firsts = [gradient.clone() for gradient in gradients]
    for first in firsts:
        dist.broadcast(first, src=0, group=wire.group)
    return last, kept, max(float((f - g).norm()) for f, g in zip(firsts, gradients, strict=True))


def test_a_gradient_of_low_rank_travels_whole(gang: Gang) -> None:
    for last, kept, apart in gang.run(compressed_beside_exact, 2):
        assert last < 1e-12
        assert kept < 1e-12
        assert apart == 0


def test_what_compressing_leaves_out_is_remembered_to_the_last_digit(gang: Gang) -> None:
    for last, kept, apart in gang.run(compressed_beside_exact, None):
        assert last > 0.1
        assert kept < 1e-12
        assert apart == 0


def test_the_first_updates_of_compressed_are_exact(gang: Gang) -> None:
    case = replace(EXAMPLE, channels=3, side=6)
    for strategy in ("ddp", "allreduce_flat"):
        ask = {"fidelity": "compressed", "compress_rank": "1"}
        assert worst(gang, asking(case, strategy, **ask, compress_after=str(UPDATES)))[strategy] < 1e-12
        assert 1e-3 < worst(gang, asking(case, strategy, **ask, compress_after="5"))[strategy] < 1
        assert 1e-3 < worst(gang, asking(case, strategy, **ask, compress_after="0"))[strategy] < 1


def left_of_ddp(rank: int, _: None) -> tuple[bool, float]:
    """Is anything of it there after the exact updates? And how far the ranks are from rank 0, having been pushed apart,
    once they were brought together.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 9))
    asked = {"strategy": "ddp", "fidelity": "compressed", "compress_after": "2", "compress_rank": "1"}
    strategy = build_strategy(parse_settings("mnist_lenet", asked), model, group_of(RANKS), CpuTimer())
    gone = [weakref.ref(strategy.exact), weakref.ref(strategy.model)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    usual, averaging.TOGETHER = averaging.TOGETHER, 2
    for update in range(4):
        optimizer.zero_grad()
        labels = torch.tensor([rank, update])
        strategy.backward(local_loss(strategy.model, torch.randn(2, 1, 3, 4), labels), 2, 2 * RANKS)
        optimizer.step()
        if update == 3:
            with torch.no_grad():
                model[1].bias += rank
        strategy.after_update()
    averaging.TOGETHER = usual
    gc.collect()
    first = model[1].bias.detach().clone()
    dist.broadcast(first, src=0, group=strategy.later.sums.group)
    return all(reference() is None for reference in gone), float((first - model[1].bias).norm())


def test_compressed_keeps_nothing_of_ddp_and_brings_the_ranks_together(gang: Gang) -> None:
    assert gang.run(left_of_ddp, None) == [(True, 0.0)] * RANKS


# ---------------------------------------------------------------------------------------------------------------------
# local


def outer_steps(rank: int, how: tuple[float, float]) -> float:
    """Averages after every update of plain SGD are updates of SGD, with the outer learning rate and momentum."""
    outer_lr, momentum = how
    ask = asking(EXAMPLE, fidelity="local", outer_lr=str(outer_lr), outer_momentum=str(momentum))
    found = train(replace(ask, optimizer=PLAIN), "ddp", group_of(4), rank, seed=rank)
    alone = replace(EXAMPLE, shares=(sum(EXAMPLE.shares),))
    optimizer = {"lr": 0.1 * outer_lr, "momentum": momentum, "nesterov": momentum > 0}
    wanted = train(replace(alone, optimizer=optimizer), "allreduce", group_of(1), 0, seed=0) if rank == 0 else found
    return float((found.after - wanted.after).norm() / (found.after - found.before).norm())


@pytest.mark.parametrize("how", [(1.0, 0.0), (0.5, 0.0), (0.7, 0.9)])
def test_an_average_is_a_step_of_the_outer_optimiser(gang: Gang, how: tuple[float, float]) -> None:
    assert max(gang.run(outer_steps, how)) < 1e-12


@pytest.mark.parametrize("strategy", ["ddp", "parameter_average"])
def test_the_first_updates_of_local_are_exact_also_where_ways_have_16_bits(gang: Gang, strategy: str) -> None:
    case = replace(EXAMPLE, local_steps=4, optimizer=PLAIN)
    ask = {"fidelity": "local", "wire": "bf16"}
    assert worst(gang, asking(case, strategy, **ask, local_after=str(UPDATES)))[strategy] < 1e-12
    assert 1e-6 < worst(gang, asking(case, strategy, **ask, local_after="5"))[strategy] < 1


def test_ways_averaged_in_16_bits_are_rounded_ways(gang: Gang) -> None:
    case = replace(EXAMPLE, optimizer=PLAIN)
    rounded = worst(gang, asking(case, "parameter_average", fidelity="local", local_steps="1", wire="bf16"))
    assert 1e-6 < rounded["parameter_average"] < HALF


def regrouped(rank: int, overlap: int) -> float:
    """Four ranks and then two: how far these come, in the round's updates that are left and move nothing, from where
    the four would have.
    """
    asked = {"local_overlap": str(overlap), "outer_lr": "0.7", "outer_momentum": "0.9"}
    settings = settings_for(replace(asking(EXAMPLE, fidelity="local", **asked), local_steps=4), "ddp")
    images, labels = data_of(EXAMPLE)
    strategy = build_strategy(settings, network(EXAMPLE, 0), group_of(RANKS), CpuTimer())
    optimizer = torch.optim.SGD(strategy.model.parameters(), **TENTH)
    for step in range(2 + 4 * (overlap > 0)):  # in mid-round; the mean of the one before still travels
        own = EXAMPLE.stream.indices(0, step % 3, rank)  # of whole batches
        optimizer.zero_grad()
        with loss_of(strategy, strategy.model, images[own], labels[own]) as loss:
            strategy.backward(loss, len(own), 7)
        optimizer.step()
        strategy.after_update()
    mean, kept = strategy.whole(), {name: tensor.clone() for name, tensor in strategy.own_state().items()}
    wanted = standing_still(strategy, EXAMPLE.shares[rank])
    if rank > 1:
        return 0.0
    fewer = build_strategy(settings, network(EXAMPLE, 0), group_of(2), CpuTimer())
    fewer.model.load_state_dict(mean.state_dict())
    fewer.expect(kept)
    for name, tensor in fewer.own_state().items():
        if not name.startswith("weights"):
            tensor.copy_(kept[name])
    fewer.regroup((6 / 7, 1 / 7)[rank])
    found = standing_still(fewer, (6, 1)[rank])
    return float((found - wanted).norm() / (wanted - vector(mean)).norm())


def standing_still(strategy: Any, samples: int) -> torch.Tensor:
    """The weights after six more updates by nothing."""
    for _ in range(6):
        strategy.backward(0 * sum(weight.sum() for weight in strategy.model.parameters()), samples, 7)
        strategy.after_update()
    return vector(strategy.whole())


@pytest.mark.parametrize("overlap", [0, 3])
def test_other_ranks_go_on_in_the_same_round_from_the_mean(gang: Gang, overlap: int) -> None:
    assert max(gang.run(regrouped, overlap)) < 1e-12


@pytest.mark.parametrize("counts", [[float("nan"), 1.0, 1.0], [1.0, -1.0, 1.0], [1.0]])
def test_a_round_that_no_run_has_written_is_refused(counts: list[float]) -> None:
    strategy = object.__new__(ParameterAverage)
    strategy.model = torch.nn.Linear(1, 1)
    with pytest.raises(TrainError, match=r"resume: .*the file is damaged"):
        strategy.expect({"round.counts": torch.tensor(counts)})


# ---------------------------------------------------------------------------------------------------------------------
# what is refused, and what a stand-in sends


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"fidelity": "hlaf"},
            "fidelity: 'hlaf' is not one of exact, half, compressed, late, local; did you mean half?",
        ),
        (
            {"fidelity": "half", "strategy": "gather_scatter"},
            "fidelity: half goes with strategy ddp, allreduce, allreduce_flat, pipeline, tensor, "
            "not with gather_scatter",
        ),
        ({"fidelity": "exact", "wire": "bf16"}, "wire: fidelity exact goes with auto or fp32"),
        (
            {"fidelity": "compressed", "amp": "fp16"},
            "amp: fp16 skips updates that overflow, and compressed would keep them in its memory; use bf16",
        ),
        (
            {"fidelity": "local", "sync_bn": "true"},
            "sync_bn: fidelity local has no single network that sees the whole batch; use ddp",
        ),
        (
            {"fidelity": "local", "local_steps": "4", "local_overlap": "4"},
            "local_overlap: 4 is too large; less than local_steps, 4",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(settings: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_settings("mnist_lenet", settings)
    assert refused.value.mistakes == (message,)


def test_nothing_is_lost_unless_asked_for() -> None:
    settings = parse_settings("resnet152_cifar", {})
    assert (settings.fidelity, settings.sent_as) == ("exact", "fp32")
    assert parse_settings("resnet152_cifar", {"fidelity": "half"}).sent_as == "bf16"


def without_bf16(_: int, __: Any) -> str:
    """As an older torch's Gloo would."""
    plain = dist.all_reduce

    def old(tensor: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if tensor.dtype == torch.bfloat16:
            raise RuntimeError("Invalid scalar type")
        return plain(tensor, *rest, **more)

    dist.all_reduce = old
    try:
        build_strategy(
            settings_for(asking(EXAMPLE, fidelity="half"), "ddp"), network(EXAMPLE, 0), group_of(RANKS), CpuTimer()
        )
    except Exception as error:
        return str(error)
    finally:
        dist.all_reduce = plain
    return "no failure"


def with_a_lost_peer(_: int, __: Any) -> str:
    plain = dist.all_reduce

    def lost(*_: Any, **__: Any) -> Any:
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1234")

    group = group_of(RANKS)
    dist.all_reduce = lost
    try:
        GradientSum(group, dtype=torch.bfloat16)
    except Exception as error:
        return str(error)
    finally:
        dist.all_reduce = plain
    return "no failure"


def test_a_lost_peer_is_not_taken_for_a_kind_of_number(gang: Gang) -> None:
    assert all("Connection closed by peer" in error for error in gang.run(with_a_lost_peer, None))


def test_half_says_what_to_use_where_gloo_knows_no_bf16(gang: Gang) -> None:
    message = f"wire bf16: torch {torch.__version__} cannot add it up; use wire=fp16"
    assert gang.run(without_bf16, None) == [message] * RANKS
