"""`data=folder`: a person's own images, DATA_DIR/train/CLASS/* and DATA_DIR/val/CLASS/*.

    listing = list_folder(Path("/data/flowers"))
    listing.classes, len(listing.train)                     ("daisy", "rose"), 3200
    image, label = FolderImages(Path("/data/flowers"), listing.train, (3, 32, 32))[0]

The classes are the names of train's folders, in the order of the alphabet; images may lie deeper within them.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS, default_loader
from torchvision.transforms import functional

from trainer.shared.errors import TrainError

_LAYOUT = "images are read from DATA_DIR/train/CLASS/* and DATA_DIR/val/CLASS/*"


@dataclass(frozen=True)
class Listing:
    """The images of a folder."""

    root: Path
    classes: tuple[str, ...]
    train: tuple[tuple[str, int], ...]
    """Each image's path below `root` and the number of its class, as in `val`."""
    val: tuple[tuple[str, int], ...]

    @property
    def digest(self) -> str:
        """The same where classes and names of all images are."""
        return hashlib.sha256(repr((self.classes, self.train, self.val)).encode()).hexdigest()[:16]


def list_folder(root: Path) -> Listing:
    """Raises TrainError, naming the place, for a folder that is missing or empty and a class that only val has."""
    classes = _folders(root / "train")
    unknown = [name for name in _folders(root / "val") if name not in classes]
    if unknown:
        raise TrainError(f"{root / 'val' / unknown[0]}: train has no class of that name; it has {_some(classes)}")
    found = {part: tuple(_images(root, part, classes)) for part in ("train", "val")}
    for number, name in enumerate(classes):
        if not any(label == number for _, label in found["train"]):
            raise TrainError(f"{root / 'train' / name} holds no image; known are {_some(IMG_EXTENSIONS)}")
    if not found["val"]:
        raise TrainError(f"{root / 'val'} holds no image; known are {_some(IMG_EXTENSIONS)}")
    return Listing(root, classes, found["train"], found["val"])


class FolderImages(Dataset[tuple[Any, int]]):
    """PIL images cut to `shape` (channels, height, width): the shorter side scaled to fit, the middle cut out."""

    def __init__(self, root: Path, files: Sequence[tuple[str, int]], shape: tuple[int, int, int]) -> None:
        self.root, self.files, self.shape = root, files, shape

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Raises TrainError naming a file that is no image or is cut short."""
        name, label = self.files[index]
        channels, height, width = self.shape
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PIL's, on metadata that play no part here
                image = default_loader(str(self.root / name)).convert("L" if channels == 1 else "RGB")
        except (OSError, SyntaxError, ValueError, EOFError) as error:  # PIL raises each of them for damaged files
            raise TrainError(f"{self.root / name} cannot be read as an image: replace or remove it") from error
        scale = max(height / image.height, width / image.width)
        size = [max(height, round(image.height * scale)), max(width, round(image.width * scale))]
        return functional.center_crop(functional.resize(image, size), [height, width]), label


def _folders(parent: Path) -> tuple[str, ...]:
    try:
        names = sorted(entry.name for entry in os.scandir(parent) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise TrainError(
            f"{parent} cannot be listed ({error.strerror}): {_LAYOUT}; give DATA_DIR with --data_dir"
        ) from error
    if not names:
        raise TrainError(f"{parent} has no folder of a class in it: {_LAYOUT}")
    return tuple(names)


def _images(root: Path, part: str, classes: Sequence[str]) -> list[tuple[str, int]]:
    found = []
    for label, name in enumerate(classes):
        for folder, _, files in os.walk(root / part / name):
            images = (file for file in files if file.lower().endswith(IMG_EXTENSIONS) and not file.startswith("."))
            found += [(os.path.relpath(os.path.join(folder, file), root), label) for file in images]
    return sorted(found, key=lambda file: (file[1], file[0]))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
