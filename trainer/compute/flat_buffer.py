"""Many tensors as one, and back: one buffer travels with one latency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
