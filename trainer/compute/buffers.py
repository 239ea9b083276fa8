"""Many tensors as one, and back: one buffer travels with one latency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def flatten(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """out: a buffer that is there already. New memory of that size costs a CPU five times what the copying does."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors], out=out)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Writes the parts of `flat` (what is left at its end is padding) into the tensors: on a GPU in a few launches."""
    pairs = list(parts_of(flat, tensors))
    if pairs and hasattr(torch, "_foreach_copy_"):  # torch 2.1
        torch._foreach_copy_([tensor for tensor, _ in pairs], [part for _, part in pairs])
        return
    for tensor, part in pairs:
        tensor.copy_(part)


def bytes_of(*tensors: Tensor) -> int:
    """As `Tensor.nbytes`, which torch has since 2.1."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def parts_of(flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor, without its history, with its part of `flat` in its own shape."""
    begin = 0
    for tensor in tensors:
        yield tensor.detach(), flat[begin : begin + tensor.numel()].view_as(tensor)
        begin += tensor.numel()


# Gradients: where a backward pass leads to, and those that an optimiser has used, to be dropped before an update's
# first backward.
#
# >>> weight = torch.ones(2, requires_grad=True)
# >>> optimizer = torch.optim.SGD([weight], lr=0.1)
# >>> loss = weight.sum()
# >>> leaves_of(loss) == {weight}
# True
# >>> loss.backward()
# >>> drop_gradients(optimizer)
# >>> weight.grad is None
# True

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
