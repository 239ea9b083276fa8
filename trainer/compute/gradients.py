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
    """Does what `optimizer.zero_grad(set_to_none=True)` does. Torch's looks at each gradient and marks the call for its
    profiler, which a small network's step feels; an optimiser with a `zero_grad` of its own is asked.
    """
    if getattr(optimizer.zero_grad, "__func__", None) is not _OF_TORCH:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = None
