"""Loss and accuracy on the test data: every sample exactly once, whatever the number of ranks.

result = judged(model, outputs, classes, device)
result.accuracy, result.per_class, result.samples
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer.compute.models import evaluated
from trainer.ranks.agreement import sum_over_ranks


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
