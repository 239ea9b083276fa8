"""Packs many tensors into one buffer, which travels with a single latency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def flatten(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """out: an existing buffer. On a CPU, allocating one takes five times as long as copying."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors], out=out)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Padding at the end of `flat` is ignored."""
    pairs = list(parts_of(flat, tensors))
    copy_into([tensor for tensor, _ in pairs], [part for _, part in pairs])


def copy_into(tensors: list[Tensor], values: list[Tensor]) -> None:
    if tensors and hasattr(torch, "_foreach_copy_"):  # torch 2.1
        torch._foreach_copy_(tensors, values)
        return
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def bytes_of(*tensors: Tensor) -> int:
    """`Tensor.nbytes` needs torch 2.1."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def parts_of(flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Detached tensors with their parts of `flat`."""
    begin = 0
    for tensor in tensors:
        yield tensor.detach(), flat[begin : begin + tensor.numel()].view_as(tensor)
        begin += tensor.numel()


_OF_TORCH = torch.optim.Optimizer.zero_grad


def leaves_of(result: Tensor) -> set[Tensor]:
    """The leaves to which backward from `result` gives gradients."""
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
    """Equals `optimizer.zero_grad(set_to_none=True)`."""
    # torch's loops over all gradients and marks the call for its profiler, which slows small networks. An optimiser
    # with its own `zero_grad` keeps it.
    zero_grad = optimizer.zero_grad
    if getattr(zero_grad, "__func__", None) is not _OF_TORCH:
        zero_grad(set_to_none=True)
        return
    for group in zero_grad.__self__.param_groups:  # the bound optimiser, which `optimizer` may only wrap
        for weight in group["params"]:
            weight.grad = None
