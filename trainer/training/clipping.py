"""Gradients scaled down to a largest norm, between the exchange and the optimiser: `Clipping(model, 1.0, ...)()`.

The norm is that of the whole network's gradient, wherever its parts lie: each weight's squares count on one rank, and
all scale by the same number (Pascanu et al. 2013, algorithm 1, with torch's 1e-6 against a division by zero). So
neither shares nor the way in which the network is cut change it, and ranks stay alike to the last bit.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Clipping:
    """limit: of the norm. counted: names of the weights whose squares count on this rank; None: of all. group: of the
    ranks whose squares add up; None where each rank's gradient is its own.
    """

    def __init__(
        self, model: nn.Module, limit: float, counted: Collection[str] | None, group: dist.ProcessGroup | None
    ) -> None:
        self.model, self.limit, self.group = model, limit, group
        self.counted = {name for name, _ in model.named_parameters()} if counted is None else set(counted)

    def __call__(self) -> None:
        """Scales .grad, in place."""
        weights = self.model.named_parameters()
        gradients = {name: _held(weight.grad) for name, weight in weights if weight.grad is not None}
        device = next(self.model.parameters()).device
        counted = [gradient for name, gradient in gradients.items() if name in self.counted and gradient.numel()]
        norms = [torch.zeros((), device=device), *(torch._foreach_norm(counted) if counted else ())]
        squares = torch.stack([norm.double() for norm in norms]).square().sum()
        if self.group is not None:
            squares = squares.to(device if dist.get_backend(self.group) == "nccl" else "cpu")
            dist.all_reduce(squares, group=self.group)
        factor = (self.limit / (squares.sqrt() + 1e-6)).clamp(max=1.0).to(device)
        if gradients:
            torch._foreach_mul_(list(gradients.values()), factor)


def _held(gradient: Any) -> Tensor:
    """Of fsdp's the piece that this rank has."""
    held: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return held
