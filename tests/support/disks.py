"""Disks that are too small, for tests as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, size: str, inodes: int | None = None) -> Iterator[Path]:
    """A disk of this size and with so many inodes, as tmpfs has them; only root may make one."""
    place.mkdir(exist_ok=True)
    options = f"size={size},mode=700" + (f",nr_inodes={inodes}" if inodes else "")
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place]).returncode:
        pytest.skip("needs root, to mount a small disk")
    (place / ".orch-work").touch()  # it is filled before a job comes
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path) -> Path:
    """Takes every byte that is left."""
    ballast = disk / "ballast"
    with open(ballast, "ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                pass
    return ballast


FREEZES = 'fsfreeze -f "$0" && echo frozen; read _; fsfreeze -u "$0"'
"""Its input ends with whoever started it, however that ends."""


@contextmanager
def disk_that_freezes(place: Path, image: Path) -> Iterator[Callable[[], None]]:
    """A call after which whoever writes to the disk at `place` waits in the kernel, until the end of the context."""
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    steps = (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, place])
    is_there = os.geteuid() == 0 and all(map(shutil.which, ("mkfs.ext4", "fsfreeze")))
    if not is_there or any(subprocess.run(step, capture_output=True).returncode for step in steps):
        pytest.skip("needs root, mkfs.ext4 and fsfreeze, to mount a disk that can be frozen")
    with ExitStack() as frozen:
        frozen.callback(subprocess.run, ["umount", "-l", place], check=True)

        def freeze() -> None:
            pipe, words = subprocess.PIPE, ["sh", "-c", FREEZES, place]
            child = frozen.enter_context(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True))
            assert child.stdout and child.stdout.readline() == "frozen\n"

        yield freeze
