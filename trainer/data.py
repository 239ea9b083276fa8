"""The data sets: torchvision's MNIST and CIFAR-10, and images made up from a seed.

    prepare(settings)                              once a host: download, verify, unpack
    train, test = open_data(settings)
    train[(epoch, index)], test[index]             (image tensor, label)

A training sample is named by epoch and index, and its augmentation is drawn from (seed, epoch, index): what a model
sees depends neither on the number of ranks nor on that of the loading processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import os
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import CIFAR10, MNIST
from torchvision.datasets.utils import check_integrity

from trainer.config import Settings
from trainer.errors import TrainError
from trainer.stream import RankBatches, derive_seed

NETWORK_TIMEOUT_S = 4.0

_SETS: dict[str, Any] = {"mnist": MNIST, "cifar10": CIFAR10}
_NORMALISE = {
    "mnist": [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))],
    "cifar10": [transforms.ToTensor(), transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))],
}
_MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
_AUGMENT = {
    "mnist": [],
    "cifar10": [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()],
}


class TrainSamples(Dataset):
    """Samples named by (epoch, index), augmented by what torch's generator draws from (seed, epoch, index)."""

    def __init__(self, samples: Dataset, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __getitem__(self, name: tuple[int, int]) -> tuple[Tensor, int]:
        epoch, index = name
        torch.default_generator.manual_seed(derive_seed("augment", self.seed, epoch, index))
        return self.samples[index]


class Synthetic(Dataset):
    """Each class is a fixed random picture, each sample that picture under noise: made up, but possible to learn."""

    def __init__(self, shape: tuple[int, int, int], classes: int, size: int, seed: int, split: str) -> None:
        self.shape, self.classes, self.size, self.seed, self.split = shape, classes, size, seed, split
        generator = torch.Generator().manual_seed(derive_seed("classes", seed))
        self.pictures = torch.randn((classes, *shape), generator=generator)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % self.classes
        generator = torch.Generator().manual_seed(derive_seed(self.split, self.seed, index))
        return self.pictures[label] + torch.randn(self.shape, generator=generator), label


def open_data(settings: Settings) -> tuple[Dataset, Dataset]:
    """The training and the test samples. Raises TrainError where the files are absent or do not load."""
    if settings.data == "synthetic":
        facts, seed = settings.data_set, settings.seed
        train: Dataset = Synthetic(facts.shape, facts.classes, facts.train_samples, seed, "train")
        return TrainSamples(train, seed), Synthetic(facts.shape, facts.classes, facts.test_samples, seed, "test")
    normalise = _NORMALISE[settings.data]
    try:
        train = _open(settings, True, transform=transforms.Compose(_AUGMENT[settings.data] + normalise))
        test = _open(settings, False, transform=transforms.Compose(normalise))
    except (OSError, RuntimeError, ValueError, EOFError, AssertionError) as error:
        raise TrainError(
            f"the {settings.data} files in {folder(settings)} do not load ({error.__class__.__name__}): "
            "delete them there and start again"
        ) from error
    return TrainSamples(train, settings.seed), test


def train_loader(samples: Dataset, batches: RankBatches, settings: Settings, device: torch.device) -> DataLoader:
    """This rank's batches of an epoch, as (images, labels); no images where its share is 0."""
    return DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=settings.num_workers,
        persistent_workers=settings.num_workers > 0,
        collate_fn=partial(collate, shape=settings.data_set.shape),
        pin_memory=device.type == "cuda",
    )


def collate(samples: Sequence[tuple[Tensor, int]], shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    if not samples:
        return torch.empty((0, *shape)), torch.empty(0, dtype=torch.long)
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


# ---------------------------------------------------------------------------------------------------------------------
# Getting the files, once a host


def folder(settings: Settings) -> Path:
    return Path(settings.data_dir).expanduser().absolute()


def prepare(settings: Settings) -> None:
    """Leaves the data set unpacked in its folder: as it was, from archives that lie there, or downloaded and verified.

    Raises TrainError where the data cannot be had.
    """
    if settings.data == "synthetic":
        return
    where = folder(settings)
    try:
        with _alone_in(where):
            if settings.data == "mnist":
                _unpack_mnist(where / "MNIST" / "raw")
            if not _is_unpacked(settings):
                _fetch(settings)
    except (OSError, RuntimeError, EOFError) as error:
        raise TrainError(
            f"cannot get {settings.data} into {where} ({_reason(error)}): give a folder that this user may write, "
            "or that holds it, with --data_dir (--set data_dir=...), or use data=synthetic"
        ) from error


def _unpack_mnist(raw: Path) -> None:
    """torchvision knows only the md5 of the archives as once published; many copies are packed anew."""
    for name, md5 in _MNIST_MD5.items():
        packed, unpacked = raw / f"{name}.gz", raw / name
        if unpacked.exists() or not packed.exists():
            continue
        content = gzip.decompress(packed.read_bytes())
        if hashlib.md5(content).hexdigest() != md5:  # noqa: S324, against damage, not against forgery
            raise TrainError(f"{packed} is damaged, or is not MNIST: delete it and start again")
        temporary = raw / f".{name}.{os.getpid()}"
        temporary.write_bytes(content)
        temporary.replace(unpacked)


def _is_unpacked(settings: Settings) -> bool:
    try:
        _open(settings, True)
    except RuntimeError:  # torchvision: "Dataset not found or corrupted"
        return False
    return True


def _fetch(settings: Settings) -> None:
    """Lets torchvision download what is missing, compare it with its known md5, and unpack it."""
    where = folder(settings)
    has_archive = settings.data == "cifar10" and check_integrity(str(where / CIFAR10.filename), CIFAR10.tgz_md5)
    if not has_archive and not _reachable(_addresses(settings)):
        raise TrainError(
            f"no {settings.data} data in {where} and no download site answers: name the folder that holds them "
            "with --data_dir (--set data_dir=...), or use data=synthetic"
        )
    where.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(sys.stderr), _short_network_timeout():
        _open(settings, True, download=True)


def _open(settings: Settings, train: bool, **options: Any) -> Dataset:
    return _SETS[settings.data](str(folder(settings)), train=train, **options)


def _addresses(settings: Settings) -> list[str]:
    if settings.data == "mnist":
        return [mirror + MNIST.resources[0][0] for mirror in MNIST.mirrors]
    return [CIFAR10.url]


def _reachable(addresses: Sequence[str]) -> bool:
    """Whether one of the addresses answers in NETWORK_TIMEOUT_S.

    Asked in threads, since looking up a name where no name server answers heeds no time limit.
    """
    answered = threading.Event()

    def ask(address: str) -> None:
        request = urllib.request.Request(address, method="HEAD")  # noqa: S310, torchvision's own addresses
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=NETWORK_TIMEOUT_S):  # noqa: S310
            answered.set()

    threads = [threading.Thread(target=ask, args=(address,), daemon=True) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NETWORK_TIMEOUT_S / len(threads))
    return answered.is_set()


@contextlib.contextmanager
def _short_network_timeout() -> Iterator[None]:
    """torchvision sets no time limit of its own: a download that stalls would hang."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _alone_in(where: Path) -> Iterator[None]:
    """One process at a time unpacks into a folder: hosts often share homes. A read-only one needs no lock."""
    try:
        lock = os.open(where / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError:
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [error.__class__.__name__])[0][:200]
