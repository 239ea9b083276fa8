"""The data sets: torchvision's MNIST and CIFAR-10, a folder of images, and images made up from a seed.

train, test = open_data(settings, facts)
image, label = train[7]                                  a PIL image as it is stored, and the number of its class
pixels, labels = whole(train, facts.train_samples)       the first so many as one uint8 tensor
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, MNIST
from torchvision.transforms import functional

from trainer.data.augment import random_words
from trainer.data.fetch import folder, open_files
from trainer.data.folders import FolderImages, list_folder
from trainer.data.sample_stream import derive_seed
from trainer.shared.errors import TrainError
from trainer.shared.experiments import IN_FOLDERS, DataSet
from trainer.shared.settings import Settings

Pictures = Dataset[tuple[Any, int]]
"""PIL images as they are stored, each with the number of its class."""
_MADE_AT_ONCE = 4096


class Synthetic(Pictures):
    """Each class is a fixed coarse picture, each sample that picture under noise: made up, but possible to learn."""

    def __init__(self, shape: tuple[int, int, int], classes: int, size: int, seed: int, split: str) -> None:
        self.shape, self.classes, self.size = shape, classes, size
        self.key = derive_seed(split, seed)
        generator = torch.Generator().manual_seed(derive_seed("classes", seed))
        self.coarse = torch.randint(0, 128, (classes, shape[0], 4, 4), generator=generator).float()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return functional.to_pil_image(self.pixels(torch.tensor([index]))[0]), index % self.classes

    def pixels(self, indices: Tensor) -> Tensor:
        """(samples, channels, height, width), uint8."""
        numbers = math.prod(self.shape)
        words = -(-numbers // 8)
        noise = random_words(self.key, indices[:, None] * words + torch.arange(words)).view(torch.uint8)
        pictures = interpolate(self.coarse[indices % self.classes], size=self.shape[1:]).to(torch.uint8)
        return pictures + (noise[:, :numbers] >> 1).view(-1, *self.shape)


def known_facts(settings: Settings) -> DataSet:
    """Without a look at the data; of as many training samples as the settings ask for."""
    return _limited(settings.data_set, settings.samples)


def find_facts(settings: Settings) -> tuple[DataSet, str]:
    """The facts of the data that this run trains on, and a word that differs for different data.

    A folder's classes and images are counted. Raises TrainError where it is not as it should be.
    """
    if settings.data not in IN_FOLDERS:
        return known_facts(settings), settings.data
    listing = list_folder(folder(settings))
    facts = dataclasses.replace(
        settings.data_set,
        classes=len(listing.classes),
        train_samples=len(listing.train),
        test_samples=len(listing.val),
    )
    return _limited(facts, settings.samples), listing.digest


def _limited(facts: DataSet, samples: int) -> DataSet:
    return dataclasses.replace(facts, train_samples=min(samples or facts.train_samples, facts.train_samples))


def open_data(settings: Settings, facts: DataSet) -> tuple[Pictures, Pictures]:
    """The training and the test images. Raises TrainError where the files are absent or do not load."""
    if settings.data == "synthetic":
        kind, seed = (facts.shape, facts.classes), settings.seed
        return (
            Synthetic(*kind, facts.train_samples, seed, "train"),
            Synthetic(*kind, facts.test_samples, seed, "test"),
        )
    if settings.data in IN_FOLDERS:
        listing = list_folder(folder(settings))
        train, val = (FolderImages(listing.root, files, facts.shape) for files in (listing.train, listing.val))
        return train, val
    try:
        return open_files(settings, train=True), open_files(settings, train=False)
    except (OSError, RuntimeError, ValueError, EOFError, AssertionError) as error:
        raise TrainError(
            f"the {settings.data} files in {folder(settings)} do not load ({error.__class__.__name__}): "
            "delete them there and start again"
        ) from error


def whole(pictures: Any, samples: int) -> tuple[Tensor, Tensor]:
    """The first so many images, uint8 (samples, channels, height, width), and their labels, int64."""
    if isinstance(pictures, MNIST):
        return pictures.data[:samples].unsqueeze(1), pictures.targets[:samples]
    if isinstance(pictures, CIFAR10):
        return torch.from_numpy(pictures.data[:samples]).permute(0, 3, 1, 2), torch.tensor(pictures.targets[:samples])
    if isinstance(pictures, Synthetic):
        indices = torch.arange(samples)
        parts = [pictures.pixels(part) for part in indices.split(_MADE_AT_ONCE)]
        return torch.cat(parts), indices % pictures.classes
    images, labels = zip(*(pictures[index] for index in range(samples)), strict=True)
    return torch.stack([functional.pil_to_tensor(image) for image in images]), torch.tensor(labels)
