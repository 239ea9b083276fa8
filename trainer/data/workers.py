"""The `workers` loader: sample by sample with PIL, in the rank or in processes beside it (torch's DataLoader).

    samples = Samples(pictures, facts, augment, seed)
    for images, labels in train_batches(samples, order, facts.shape, num_workers, device): ...

Gives the same numbers as `resident`; for sets that do not fit on the device, and to compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from trainer.data.augment import Augmentation
from trainer.data.batch import start_of
from trainer.data.resident import in_stream
from trainer.data.sample_stream import RankBatches
from trainer.shared.errors import TrainError
from trainer.shared.experiments import DataSet

Batch = tuple[Tensor, Tensor]


class Samples(Dataset[tuple[Tensor, int]]):
    """Normalised images and labels; `vary`: as they are trained on, named by (epoch, index)."""

    def __init__(self, pictures: Any, facts: DataSet, augment: Augmentation | None = None, seed: int = 0) -> None:
        self.pictures, self.augment, self.seed, self.size = pictures, augment, seed, facts.shape[1:]
        self.to_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize(facts.mean, facts.std)])

    def __getitem__(self, name: tuple[int, int]) -> tuple[Tensor, int]:
        return self.__getitems__([name])[0]

    def __getitems__(self, names: Sequence[tuple[int, int]]) -> list[tuple[Tensor, int]]:
        """A whole batch, which torch's DataLoader asks for where it can: its parameters are drawn at once."""
        loaded = [self.pictures[index] for _, index in names]
        if self.augment and names:
            indices = torch.tensor([index for _, index in names])
            rows = self.augment.draw(self.seed, names[0][0], indices, *self.size)
            loaded = [
                (self.augment.picture(image, row), label) for (image, label), row in zip(loaded, rows, strict=True)
            ]
        return [(self.to_tensor(image), label) for image, label in loaded]


class WorkerBatches:
    """A DataLoader; a TrainError of a loading process, which arrives with its traceback, is raised as one line. A batch
    for a GPU is copied there while it computes with the one before.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __iter__(self) -> Iterator[Batch]:
        batches = _in_one_line(iter(self.loader))  # starts the processes, and draws their seed, at once
        return batches if self.device.type == "cpu" else _copied(batches, self.device)


def _copied(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """From pinned memory, in a stream beside the one that computes."""

    def copy(batch: Batch) -> list[Batch]:
        images, labels = batch
        return [(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))]

    for (batch,) in in_stream(partial(copy, batch) for batch in batches):
        yield batch


def _in_one_line(batches: Iterator[Batch]) -> Iterator[Batch]:
    try:
        yield from batches
    except TrainError as error:
        line = str(error).splitlines()[-1].partition(f"{TrainError.__name__}: ")
        raise TrainError(line[2] or line[0]) from error


def train_batches(
    samples: Samples, order: RankBatches, shape: tuple[int, ...], num_workers: int, device: torch.device
) -> WorkerBatches:
    """This rank's batches of an epoch, as (images, labels); no images where its share is 0."""
    return WorkerBatches(
        DataLoader(
            samples,
            batch_sampler=order,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            multiprocessing_context=start_of(num_workers),
            collate_fn=partial(collate, shape=shape),
            pin_memory=device.type == "cuda",
        ),
        device,
    )


def test_batches(samples: Samples, indices: range, batch: int, num_workers: int) -> WorkerBatches:
    """The samples as they are, `batch` at a time."""
    names = [[(0, index) for index in indices[begin : begin + batch]] for begin in range(0, len(indices), batch)]
    started: dict[str, Any] = {"num_workers": num_workers, "multiprocessing_context": start_of(num_workers)}
    return WorkerBatches(DataLoader(samples, batch_sampler=names, **started), torch.device("cpu"))


def collate(samples: Sequence[tuple[Tensor, int]], shape: tuple[int, ...]) -> Batch:
    if not samples:
        return torch.empty((0, *shape)), torch.empty(0, dtype=torch.long)
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)
