"""Keeps a moving average of the weights (`ema`), and measures loss and accuracy on the test samples.

ema.update(updates)                 after each update, the first is 1
with ema.in_place():                the network has the average's weights
"""
# The decay of update n is at most (1 + n) / (10 + n), to forget the first weights soon, as in TensorFlow's
# ExponentialMovingAverage.

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compute.models import evaluated
from trainer.ranks.agreement import sum_over_ranks
from trainer.strategies import cross_entropy_sum


class Ema:
    """model: this rank's part of the network."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self.weights = [_held(weight) for weight in model.parameters() if weight.requires_grad]
        self.means = [weight.clone() for weight in self.weights]

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """updates: of the whole run."""
        if not self.means:  # all frozen, possible in a pipeline stage
            return
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_mul_(self.means, decay)
        torch._foreach_add_(self.means, self.weights, alpha=1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Restores the weights bit-identically."""
        own = [weight.clone() for weight in self.weights]
        _write(self.weights, self.means)
        try:
            yield
        finally:
            _write(self.weights, own)

    def restart(self, state: Mapping[str, Tensor]) -> None:
        """state: by name; empty: the network's weights."""
        _write(self.means, [state[name] for name in self.names] if state else self.weights)


def _held(weight: Any) -> Tensor:
    """Detached; with fsdp this rank's piece."""
    held = weight.detach()
    piece: Tensor = held.to_local() if hasattr(held, "to_local") else held
    return piece


@torch.no_grad()
def _write(places: list[Tensor], values: list[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


@dataclass(frozen=True)
class Evaluation:
    samples: int
    """Tokens, if the samples are text."""
    accuracy: float
    per_class: tuple[float | None, ...]
    """By class; None without samples."""
    loss: float


@torch.no_grad()
def judged(
    model: nn.Module, outputs: Iterable[tuple[Tensor, Tensor]], classes: int, device: torch.device
) -> Evaluation:
    """Every test sample once, over all ranks. A collective call.

    outputs: logits and labels of this rank, computed as they are drawn.
    """
    counts = torch.zeros((2, classes), dtype=torch.float64, device=device)  # by class: correct, samples
    loss = torch.zeros((), dtype=torch.float64, device=device)
    with evaluated(model):
        for output, labels in outputs:
            labels = labels.to(device)
            loss += cross_entropy_sum(output, labels)
            right = (output.argmax(dim=1) == labels).double().flatten()
            counts.index_add_(1, labels.flatten(), torch.stack([right, torch.ones_like(right)]))
    totals = sum_over_ranks([loss.item(), *counts.flatten().tolist()])
    right_of, samples_of = totals[1 : 1 + classes], totals[1 + classes :]
    samples = sum(samples_of)
    return Evaluation(
        samples=int(samples),
        accuracy=sum(right_of) / samples,
        per_class=tuple(r / n if n else None for r, n in zip(right_of, samples_of, strict=True)),
        loss=totals[0] / samples,
    )
