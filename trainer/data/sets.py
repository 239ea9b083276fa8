"""The data sets: MNIST, CIFAR-10, a folder of images, and synthetic images."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, MNIST
from torchvision.datasets.folder import IMG_EXTENSIONS, default_loader
from torchvision.transforms import functional

from trainer.data.augment import random_words
from trainer.data.fetch import folder, open_files
from trainer.data.sample_stream import derive_seed
from trainer.data.text import Text, made_text, read_text, samples_in
from trainer.shared.errors import TrainError
from trainer.shared.experiments import IN_FOLDERS, DataSet
from trainer.shared.settings import Settings

Pictures = Dataset[tuple[Any, int]]
"""PIL images with their classes."""
_MADE_AT_ONCE = 4096


class Synthetic(Pictures):
    """Noisy copies of one coarse picture per class: learnable."""

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
        """uint8 (samples, channels, height, width)."""
        numbers = math.prod(self.shape)
        words = -(-numbers // 8)
        noise = random_words(self.key, indices[:, None] * words + torch.arange(words)).view(torch.uint8)
        pictures = interpolate(self.coarse[indices % self.classes], size=self.shape[1:]).to(torch.uint8)
        return pictures + (noise[:, :numbers] >> 1).view(-1, *self.shape)


def known_facts(settings: Settings) -> DataSet:
    """Without reading the data; at most `samples` of the settings."""
    return _limited(settings.data_set, settings.samples)


def find_facts(settings: Settings) -> tuple[DataSet, str]:
    """The data's facts, and a string that differs for different data. Raises TrainError for a faulty folder."""
    if settings.data_set.is_text:
        text = open_text(settings)
        facts = dataclasses.replace(
            settings.data_set,
            train_samples=samples_in(len(text.train), settings.tokens),
            test_samples=samples_in(len(text.test), settings.tokens),
            bytes_per_token=text.bytes_per_token,
        )
        return _limited(facts, settings.samples), text.digest
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


def open_text(settings: Settings) -> Text:
    """Raises TrainError."""
    if settings.data == "synthetic":
        return made_text(settings.tokens, settings.seed, settings.vocabulary)
    return read_text(folder(settings), settings.tokens, settings.vocabulary)


def _limited(facts: DataSet, samples: int) -> DataSet:
    return dataclasses.replace(facts, train_samples=min(samples or facts.train_samples, facts.train_samples))


def open_data(settings: Settings, facts: DataSet) -> tuple[Pictures, Pictures]:
    """Training and test images. Raises TrainError if the files are absent or do not load."""
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
    """The first images, uint8 (samples, channels, height, width), and labels, int64."""
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


# `data=folder`: DATA_DIR/train/CLASS/* and DATA_DIR/val/CLASS/*. The classes are train's folders in alphabetical order;
# images may lie deeper.

_LAYOUT = "images are read from DATA_DIR/train/CLASS/* and DATA_DIR/val/CLASS/*"


@dataclass(frozen=True)
class Listing:
    root: Path
    classes: tuple[str, ...]
    train: tuple[tuple[str, int], ...]
    """(path below `root`, class) of each image; also `val`."""
    val: tuple[tuple[str, int], ...]

    @property
    def digest(self) -> str:
        """Depends on the classes and names of all images."""
        return hashlib.sha256(repr((self.classes, self.train, self.val)).encode()).hexdigest()[:16]


def list_folder(root: Path) -> Listing:
    """Raises TrainError for missing or empty folders, and classes that only val has."""
    classes = _folders(root / "train")
    unknown = [name for name in _folders(root / "val") if name not in classes]
    if unknown:
        raise TrainError(f"{root / 'val' / unknown[0]}: train has no class of that name; it has {_some(classes)}")
    found = {part: tuple(_images(root, part, classes)) for part in ("train", "val")}
    for number, name in enumerate(classes):
        if not any(label == number for _, label in found["train"]):
            raise TrainError(f"{root / 'train' / name} holds no image of a known type: {_some(IMG_EXTENSIONS)}")
    if not found["val"]:
        raise TrainError(f"{root / 'val'} holds no image of a known type: {_some(IMG_EXTENSIONS)}")
    return Listing(root, classes, found["train"], found["val"])


class FolderImages(Dataset[tuple[Any, int]]):
    """PIL images in `shape` (channels, height, width): scaled to cover it, then centre-cropped."""

    def __init__(self, root: Path, files: Sequence[tuple[str, int]], shape: tuple[int, int, int]) -> None:
        self.root, self.files, self.shape = root, files, shape

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Raises TrainError for a file that is no image or is truncated."""
        name, label = self.files[index]
        channels, height, width = self.shape
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PIL's, about unused metadata
                image = default_loader(str(self.root / name)).convert("L" if channels == 1 else "RGB")
        except (OSError, SyntaxError, ValueError, EOFError) as error:  # PIL raises any of these for damaged files
            raise TrainError(f"{self.root / name} cannot be read as an image: replace or remove it") from error
        scale = max(height / image.height, width / image.width)
        size = [max(height, round(image.height * scale)), max(width, round(image.width * scale))]
        return functional.center_crop(functional.resize(image, size), [height, width]), label


def _folders(parent: Path) -> tuple[str, ...]:
    try:
        names = sorted(entry.name for entry in os.scandir(parent) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise TrainError(
            f"{parent} cannot be listed ({error.strerror}): {_LAYOUT}; give DATA_DIR with --data_dir, or copy it to "
            "the hosts with `orch data push DIR`"
        ) from error
    if not names:
        raise TrainError(f"{parent} holds no folder of a class: {_LAYOUT}")
    return tuple(names)


def _images(root: Path, part: str, classes: Sequence[str]) -> list[tuple[str, int]]:
    found = []
    for label, name in enumerate(classes):
        for where, _, files in os.walk(root / part / name):
            images = (file for file in files if file.lower().endswith(IMG_EXTENSIONS) and not file.startswith("."))
            found += [(os.path.relpath(os.path.join(where, file), root), label) for file in images]
    return sorted(found, key=lambda file: (file[1], file[0]))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
