"""Gradients that an optimiser has used: `drop_gradients(optimizer)` before an update's first backward.

>>> weight = torch.ones(2, requires_grad=True)
>>> optimizer = torch.optim.SGD([weight], lr=0.1)
>>> weight.sum().backward()
>>> drop_gradients(optimizer)
>>> weight.grad is None
True
"""

from __future__ import annotations

from typing import Any

import torch

_OF_TORCH = torch.optim.Optimizer.zero_grad


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
