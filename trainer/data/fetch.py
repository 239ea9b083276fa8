"""Gets a data set's files, once per host: unpacked already, from archives, or downloaded and verified."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import math
import os
import socket
import struct
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchvision.datasets import CIFAR10, MNIST
from torchvision.datasets.utils import check_integrity

from trainer.shared.errors import TrainError
from trainer.shared.settings import Settings

NETWORK_TIMEOUT_S = 4.0

_SETS: dict[str, Any] = {"mnist": MNIST, "cifar10": CIFAR10}
MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def folder(settings: Settings) -> Path:
    return Path(os.path.expandvars(settings.data_dir)).expanduser().absolute()


def prepare(settings: Settings) -> None:
    """Raises TrainError if the data cannot be had."""
    if settings.data not in _SETS:
        return
    where = folder(settings)
    try:
        with _alone_in(where):
            if settings.data == "mnist":
                _unpack_mnist(where / "MNIST" / "raw")
                _check_mnist(where / "MNIST" / "raw")
            if not _is_unpacked(settings):
                _fetch(settings)
    except (OSError, RuntimeError, EOFError) as error:
        raise TrainError(
            f"cannot get {settings.data} into {where} ({_reason(error)}): give a folder that this user may write, "
            "or that holds it, with --data_dir (--set data_dir=...), or use data=synthetic"
        ) from error


def _unpack_mnist(raw: Path) -> None:
    """torchvision has only the md5 of the original archives; many copies were repacked."""
    for name, md5 in MNIST_MD5.items():
        packed, unpacked = raw / f"{name}.gz", raw / name
        if unpacked.exists() or not packed.exists():
            continue
        content = gzip.decompress(packed.read_bytes())
        if hashlib.md5(content).hexdigest() != md5:  # noqa: S324, against damage, not against forgery
            raise TrainError(f"{packed} is damaged, or is not MNIST: delete it and start again")
        temporary = raw / f".{name}.{os.getpid()}"
        temporary.write_bytes(content)
        temporary.replace(unpacked)


def _check_mnist(raw: Path) -> None:
    """Raises TrainError for a truncated file, which torchvision would report as absent."""
    for path in (raw / name for name in MNIST_MD5):
        if not path.exists():
            continue
        size, dimensions = path.stat().st_size, 3 if "images" in path.name else 1
        header = 4 * (1 + dimensions)
        with path.open("rb") as file:
            begin = file.read(header)
        expected = header
        if len(begin) == header:
            expected += math.prod(struct.unpack(f">{1 + dimensions}i", begin)[1:])
        if size < expected:
            raise TrainError(
                f"{path} is damaged (it has {size:,} of at least {expected:,} bytes): delete it and start again"
            )


def _is_unpacked(settings: Settings) -> bool:
    try:
        open_files(settings, True)
    except RuntimeError:  # torchvision: "Dataset not found or corrupted"
        return False
    return True


def _fetch(settings: Settings) -> None:
    where = folder(settings)
    has_archive = settings.data == "cifar10" and check_integrity(str(where / CIFAR10.filename), CIFAR10.tgz_md5)
    if not has_archive and not _reachable(_addresses(settings)):
        raise TrainError(
            f"no {settings.data} data in {where} and no download site answers: copy them to the hosts "
            "(`orch data push DIR`), name their folder with --data_dir (--set data_dir=...), or use data=synthetic"
        )
    where.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(sys.stderr), _short_network_timeout():
        open_files(settings, True, download=True)


def open_files(settings: Settings, train: bool, **options: Any) -> Any:
    return _SETS[settings.data](str(folder(settings)), train=train, **options)


def _addresses(settings: Settings) -> list[str]:
    if settings.data == "mnist":
        return [mirror + MNIST.resources[0][0] for mirror in MNIST.mirrors]
    return [CIFAR10.url]


def _reachable(addresses: Sequence[str]) -> bool:
    """Whether an address answers within NETWORK_TIMEOUT_S."""
    # In threads: name look-ups without a name server ignore the timeout.
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
    """torchvision sets no timeout, so a stalled download would hang."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _alone_in(where: Path) -> Iterator[None]:
    """A lock for unpacking, because hosts often share homes. Read-only folders need none."""
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
