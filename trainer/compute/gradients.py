"""Gradients: where a backward pass leads to, and those that an optimiser has used, to be dropped before an update's
first backward.

>>> weight = torch.ones(2, requires_grad=True)
>>> optimizer = torch.optim.SGD([weight], lr=0.1)
>>> loss = weight.sum()
>>> leaves_of(loss) == {weight}
True
>>> loss.backward()
>>> drop_gradients(optimizer)
>>> weight.grad is None
True
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_OF_TORCH = torch.optim.Optimizer.zero_grad


def leaves_of(result: Tensor) -> set[Tensor]:
    """The parameters and other leaves for which a backward pass from the result computes gradients."""
    found: set[Tensor] = set()
    ahead, seen = [result.grad_fn], set()
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        ahead += [following for following, _ in node.next_functions]
    return found


def drop_gradients(optimizer: Any) -> None:
    """Leaves what `optimizer.zero_grad(set_to_none=True)` leaves. Torch's looks at each gradient and marks the call for
    its profiler, which a small network's step feels; an optimiser with a `zero_grad` of its own is asked.
    """
    zero_grad = optimizer.zero_grad
    if getattr(zero_grad, "__func__", None) is not _OF_TORCH:
        zero_grad(set_to_none=True)
        return
    for group in zero_grad.__self__.param_groups:  # of the one that it is bound to: the optimiser may only wrap that
        for weight in group["params"]:
            weight.grad = None
