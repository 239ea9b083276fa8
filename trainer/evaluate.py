"""Loss and accuracy on the test data: every sample exactly once, whatever the number of ranks.

result = evaluate(model, test, settings, info, device)
result.accuracy, result.per_class, result.samples
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset

from trainer.config import Settings
from trainer.env import RankInfo
from trainer.models import running_statistics
from trainer.ranks import sum_over_ranks
from trainer.shares import equal_shares


@dataclass(frozen=True)
class Evaluation:
    """Over all ranks. per_class: accuracy of each class, None where the test data have no sample of it."""

    samples: int
    accuracy: float
    per_class: tuple[float | None, ...]
    loss: float


def average_running_statistics(model: nn.Module, group: dist.ProcessGroup, samples: int) -> None:
    """Leaves on every rank the mean of all ranks' BatchNorm statistics, each counted by its samples.

    samples: how many this rank has trained on since the last time. The spread between the ranks' means is left out
    of the variance: with shuffled samples it is small.
    """
    statistics = running_statistics(model)
    total = sum_over_ranks([float(samples)])[0]
    if not statistics or total == 0:
        return
    flat = torch.cat([buffer.flatten() for buffer in statistics]) * (samples / total)
    dist.all_reduce(flat, group=group)
    for buffer, mean in zip(statistics, flat.split([b.numel() for b in statistics]), strict=True):
        buffer.copy_(mean.view_as(buffer))


@torch.no_grad()
def evaluate(model: nn.Module, test: Dataset, settings: Settings, info: RankInfo, device: torch.device) -> Evaluation:
    classes = settings.data_set.classes
    correct = torch.zeros(classes, dtype=torch.float64)
    count = torch.zeros(classes, dtype=torch.float64)
    loss = 0.0
    own = Subset(test, range(info.rank, len(test), info.world_size))
    largest_share = equal_shares(settings.batch, info.world_size)[0]
    model.eval()
    for images, labels in DataLoader(own, batch_size=largest_share, num_workers=settings.num_workers):
        output = model(images.to(device))
        loss += cross_entropy(output, labels.to(device), reduction="sum").item()
        right = output.argmax(dim=1).cpu() == labels
        correct += torch.bincount(labels[right], minlength=classes)
        count += torch.bincount(labels, minlength=classes)
    model.train()
    totals = sum_over_ranks([loss, *correct.tolist(), *count.tolist()])
    right_of, samples_of = totals[1 : 1 + classes], totals[1 + classes :]
    samples = sum(samples_of)
    return Evaluation(
        samples=int(samples),
        accuracy=sum(right_of) / samples,
        per_class=tuple(r / n if n else None for r, n in zip(right_of, samples_of, strict=True)),
        loss=totals[0] / samples,
    )
