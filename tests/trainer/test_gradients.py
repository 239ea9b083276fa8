"""Gradients that have been used are dropped as the optimiser itself would drop them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.compute.buffers import drop_gradients


class Counting(torch.optim.SGD):
    asked = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.asked += 1
        super().zero_grad(set_to_none)


@pytest.fixture
def weights() -> list[Tensor]:
    made = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(1, requires_grad=True)]
    (made[0].sum() + made[2].sum()).backward()
    return made


def test_no_weight_of_any_group_has_one_left(weights: list[Tensor]) -> None:
    groups: list[dict[str, Any]] = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.5}]
    drop_gradients(torch.optim.SGD(groups, lr=0.1))
    assert [weight.grad for weight in weights] == [None, None, None]


def test_what_the_optimiser_does_not_move_keeps_its_own(weights: list[Tensor]) -> None:
    drop_gradients(torch.optim.SGD(weights[:2], lr=0.1))
    assert weights[0].grad is None and torch.equal(weights[2].grad, torch.ones(1))  # type: ignore[arg-type]


def test_an_optimiser_that_drops_them_in_its_own_way_is_asked(
    weights: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, asked = Counting(weights, lr=0.1), list[bool]()
    drop_gradients(own)
    assert own.asked == 1 and weights[0].grad is None
    changed = torch.optim.SGD(weights, lr=0.1)
    monkeypatch.setattr(changed, "zero_grad", lambda set_to_none: asked.append(set_to_none))
    drop_gradients(changed)
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none: asked.append(set_to_none))
    drop_gradients(torch.optim.SGD(weights, lr=0.1))
    assert asked == [True, True]


def test_one_that_is_wrapped_drops_its_own(weights: list[Tensor]) -> None:
    wrapped = torch.optim.SGD(weights, lr=0.1)
    drop_gradients(SimpleNamespace(zero_grad=wrapped.zero_grad, param_groups=[]))
    assert [weight.grad for weight in weights] == [None, None, None]
