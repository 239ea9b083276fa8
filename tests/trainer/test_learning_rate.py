"""The learning rate by samples seen: its form, that nothing else decides it, and that an optimiser gets it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.data import SampleStream
from trainer.shared import LR_SCHEDULES, Schedule, SettingsError, parse_lr_steps, parse_settings
from trainer.training import Clipping, Progress, Rates, middle_of_update, rates_of, samples_before

schedules = st.builds(
    Schedule,
    kind=st.sampled_from(LR_SCHEDULES),
    epoch_samples=st.integers(1, 10_000),
    run_samples=st.integers(1, 100_000),
    warmup_epochs=st.just(0.0) | st.floats(0.001, 12),
    steps=st.lists(st.floats(0.1, 12), max_size=3, unique=True).map(lambda epochs: tuple(sorted(epochs))),
    step_factor=st.floats(0.01, 0.99),
)


@given(schedule=schedules, first=st.floats(0, 1), second=st.floats(0, 1))
def test_a_rate_rises_in_the_warm_up_and_never_afterwards(schedule: Schedule, first: float, second: float) -> None:
    warmup = schedule.warmup_samples
    early, late = sorted(part * schedule.run_samples for part in (first, second))
    of_early, of_late = schedule.factor(early), schedule.factor(late)
    assert 0 <= of_early <= 1 and 0 <= of_late <= 1
    assert (of_early <= of_late) if late < warmup else (early < warmup or of_early >= of_late)


@given(schedule=schedules)
def test_the_full_rate_begins_where_the_warm_up_ends(schedule: Schedule) -> None:
    warmup = schedule.warmup_samples
    assert warmup == min(schedule.warmup_epochs * schedule.epoch_samples, schedule.run_samples / 2)
    if schedule.kind != "step":
        assert schedule.factor(warmup) == 1
    if warmup:
        assert schedule.factor(warmup / 2) == pytest.approx(0.5)


def test_each_kind_has_its_form() -> None:
    cosine = Schedule("cosine", 100, 1_000, warmup_epochs=2)
    assert [cosine.factor(seen) for seen in (0, 50, 200)] == [0, 0.25, 1]
    assert cosine.factor(600) == pytest.approx(0.5)
    assert cosine.factor(1_000) == pytest.approx(0, abs=1e-15)
    assert cosine.factor(400) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    step = Schedule("step", 100, 1_000, steps=(3, 6.5), step_factor=0.1)
    assert [step.factor(seen) for seen in (299, 300, 649, 650)] == pytest.approx([1, 0.1, 0.1, 0.01])
    assert Schedule("constant", 100, 1_000).is_constant
    assert not Schedule("constant", 100, 1_000, warmup_epochs=0.1).is_constant


@given(
    size=st.integers(1, 300),
    shares=st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any),
    epochs=st.integers(1, 3),
    kind=st.sampled_from(LR_SCHEDULES),
)
def test_ranks_and_shares_do_not_change_it_and_half_the_batch_sees_the_same_curve(
    size: int, shares: list[int], epochs: int, kind: str
) -> None:
    batch = sum(shares)
    asked = {"lr_schedule": kind, "lr_warmup": "0.5", "epochs": str(epochs), "batch": str(batch)}
    asked |= {"lr_steps": "1,1.5"} if kind == "step" else {}

    def of_updates(stream: SampleStream, more: Mapping[str, str] = MappingProxyType({})) -> list[float]:
        settings = parse_settings("mnist_lenet", {**asked, **more})
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        rates, found = rates_of(settings, optimizer, stream), []
        for number in range(epochs * stream.steps):
            rates.before_update(stream, Progress(*divmod(number, stream.steps)))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    whole, split = SampleStream(size, batch, (batch,), 0), SampleStream(size, batch, tuple(shares), 0)
    assert of_updates(whole) == of_updates(split)
    assert of_updates(whole) == of_updates(whole, {"steps": "1"}), "it ends early, and is the beginning of the same"
    assert samples_before(whole, epochs, 0) == epochs * size
    passed, middles = 0, []
    for epoch in range(epochs):
        for step in range(whole.steps):
            middles.append(middle_of_update(whole, Progress(epoch, step)))
            assert middles[-1] == passed + whole.batch_at(step) / 2
            passed += whole.batch_at(step)


def test_groups_keep_their_proportion_and_a_scale_is_for_good() -> None:
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}], lr=0.25)
    rates = Rates(optimizer, Schedule("cosine", 100, 1_000), scale=4.0)
    for seen, factor in ((500, 0.5), (0, 1.0)):
        rates.set(seen)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.0 * factor, 2.0 * factor])


def test_a_schedule_of_a_scripts_own_is_left_alone() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.25)
    rates = Rates(optimizer, Schedule("constant", 100, 1_000))
    optimizer.param_groups[0]["lr"] = 0.125
    rates.before_update(SampleStream(100, 10, (10,), 0), Progress(epoch=5))
    assert optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ({"lr_steps": "3,5"}, "lr_steps: does nothing with lr_schedule cosine; use step"),
        ({"lr_factor": "0.5", "lr_schedule": "constant"}, "lr_factor: does nothing with lr_schedule constant; use"),
        ({"lr_schedule": "step"}, "lr_steps: name the epochs after which the rate falls, like lr_steps=30,60,80"),
        ({"lr_schedule": "step", "lr_steps": "5,x"}, "lr_steps: '5,x' is not a list of epochs like 30,60,80"),
        ({"lr_schedule": "step", "lr_steps": "5,3"}, "lr_steps: '5,3': expected epochs above 0, each later than"),
        ({"warmup": "5"}, "warmup: no such setting; did you mean lr_warmup?"),
    ],
)
def test_what_makes_no_schedule_is_refused(pairs: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings("mnist_lenet", pairs)
    (mistake,) = caught.value.mistakes
    assert mistake.startswith(said)


def test_epochs_of_a_step_schedule() -> None:
    assert parse_lr_steps("") == ()
    assert parse_lr_steps("1.5, 3") == (1.5, 3)


class Calls(TorchDispatchMode):
    """Counts calls below autograd: launches, on a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "detach" not in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_clipping_takes_equally_many_calls_for_any_number_of_weights(dtype: torch.dtype) -> None:
    counts = []
    for layers in (1, 20):
        torch.manual_seed(0)
        network = nn.Sequential(*(nn.Linear(5, 5, dtype=dtype) for _ in range(layers)))
        for weight in network.parameters():
            weight.grad = torch.randn(weight.shape, dtype=dtype)
        gradients = [weight.grad.clone() for weight in network.parameters() if weight.grad is not None]
        norm = torch.stack([gradient.norm().double() for gradient in gradients]).square().sum().sqrt()
        factor = (0.1 / (norm + 1e-6)).clamp(max=1.0)
        with Calls() as calls:
            Clipping(network, 0.1, None, None)()
        counts.append(calls.count)
        expected = [gradient * factor for gradient in gradients]
        found = [weight.grad for weight in network.parameters() if weight.grad is not None]
        assert all(map(torch.equal, found, expected))
    assert counts[0] == counts[1]
