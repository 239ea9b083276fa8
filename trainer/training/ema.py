"""An exponential moving average of the weights, which evaluations and checkpoints see beside the weights themselves.

    ema = Ema(model, decay=0.999)
    ema.update(updates)                 after each update, the first of which is 1
    with ema.in_place():                the network has the average's weights
        ...

The decay of update n is at most (1 + n) / (10 + n), so that the first weights are soon forgotten, as TensorFlow's
ExponentialMovingAverage has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer.compute.models import evaluated
from trainer.ranks.agreement import sum_over_ranks


class Ema:
    """model: what this rank holds of the network; the average is of the same part."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self.weights = [_held(weight) for weight in model.parameters() if weight.requires_grad]
        self.means = [weight.clone() for weight in self.weights]

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """updates: of the whole run, this one among them."""
        if not self.means:  # all frozen, as a stage of a pipeline may be
            return
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_mul_(self.means, decay)
        torch._foreach_add_(self.means, self.weights, alpha=1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Afterwards the network has its own weights again, to the last bit."""
        own = [weight.clone() for weight in self.weights]
        _write(self.weights, self.means)
        try:
            yield
        finally:
            _write(self.weights, own)

    def restart(self, state: Mapping[str, Tensor]) -> None:
        """With these weights, by name; without any with the network's as they are now."""
        _write(self.means, [state[name] for name in self.names] if state else self.weights)


def _held(weight: Any) -> Tensor:
    """Without its history; of fsdp's the piece that this rank has."""
    held = weight.detach()
    piece: Tensor = held.to_local() if hasattr(held, "to_local") else held
    return piece


@torch.no_grad()
def _write(places: list[Tensor], values: list[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


# Loss and accuracy on the test data: every sample exactly once, whatever the number of ranks.
#
# result = judged(model, outputs, classes, device)
# result.accuracy, result.per_class, result.samples


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation gave, over all ranks."""

    samples: int
    accuracy: float
    per_class: tuple[float | None, ...]
    """Accuracy of each class; None where the test data have no sample of it."""
    loss: float


@torch.no_grad()
def judged(
    model: nn.Module, outputs: Iterable[tuple[Tensor, Tensor]], classes: int, device: torch.device
) -> Evaluation:
    """outputs: logits and labels of what this rank is to judge, which may be nothing; the model computes as they are
    drawn. Waits for all ranks.
    """
    counts = torch.zeros((2, classes), dtype=torch.float64, device=device)  # of each class: right, samples
    loss = torch.zeros((), dtype=torch.float64, device=device)
    with evaluated(model):
        for output, labels in outputs:
            labels = labels.to(device)
            loss += cross_entropy(output, labels, reduction="sum")
            right = (output.argmax(dim=1) == labels).double()
            counts.index_add_(1, labels, torch.stack([right, torch.ones_like(right)]))
    totals = sum_over_ranks([loss.item(), *counts.flatten().tolist()])
    right_of, samples_of = totals[1 : 1 + classes], totals[1 + classes :]
    samples = sum(samples_of)
    return Evaluation(
        samples=int(samples),
        accuracy=sum(right_of) / samples,
        per_class=tuple(r / n if n else None for r, n in zip(right_of, samples_of, strict=True)),
        loss=totals[0] / samples,
    )
