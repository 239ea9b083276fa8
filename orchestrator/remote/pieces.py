"""The contents of files on their way to the controller: frames (see `reader`), and what is next of a file.

A hole of a sparse file travels as its length: what takes no room here takes none there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .watchdog import wind

BEAT_S = 1.0
CHUNK_BYTES = 1 << 18
HOLE_BYTES = 1 << 20
"""Shorter holes travel as the zeros that they read as."""
MOST_HOLE_BYTES = 1 << 43
"""Longer ones travel in parts."""
BLOCK_BYTES = 1 << 20
ZEROS = bytes(BLOCK_BYTES)


class Out:
    """The way to the controller. marker: begins each frame, since a shell may print beside us."""

    def __init__(self, marker: str) -> None:
        self._marker = marker.encode()
        self._beat_due = 0.0

    def frame(self, header: dict[str, Any], payload: bytes = b"") -> None:
        wind()
        sys.stdout.buffer.write(self._marker + json.dumps(header).encode() + b"\n" + payload)
        sys.stdout.buffer.flush()

    def beat(self) -> None:
        """At most once in BEAT_S."""
        if time.monotonic() > self._beat_due:
            self._beat_due = time.monotonic() + BEAT_S
            self.frame({"beat": 1})


@contextlib.contextmanager
def opened(path: Path) -> Any:
    """A descriptor; None unless it is a regular file of our own: a link, or one for its folder, leads elsewhere."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            handle = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno == errno.EIO:
            raise
        yield None
        return
    try:
        found = os.fstat(handle)
        yield handle if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() else None
    finally:
        os.close(handle)


def next_piece(handle: int, offset: int, limit: int) -> tuple[int, bytes]:
    """(length of a hole, b"") or (0, bytes), from here on and not beyond the limit; (0, b"") where there is no more."""
    hole = min(_data_after(handle, offset, limit), limit, offset + MOST_HOLE_BYTES) - offset
    if hole >= HOLE_BYTES:
        return hole, b""
    return 0, os.pread(handle, min(CHUNK_BYTES, max(0, limit - offset)), offset)


def _data_after(handle: int, offset: int, limit: int) -> int:
    """Where the next bytes lie that take room on the disk; the limit where none do."""
    if offset >= limit:
        return offset
    try:
        return os.lseek(handle, offset, os.SEEK_DATA)
    except OSError as error:
        return limit if error.errno == errno.ENXIO else offset  # or this file system knows of no holes


class Digest:
    """SHA-256 of a file of any size, for which its holes cost nothing: of its blocks of BLOCK_BYTES, each behind its
    number, without those that hold only zeros; and of its size. The controller computes the same (`files.py`).
    """

    def __init__(self) -> None:
        self._sha256, self._number, self._block = hashlib.sha256(), 0, bytearray()

    def add(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            room = BLOCK_BYTES - len(self._block)
            self._block += left[:room]
            left = left[room:]
            if len(self._block) == BLOCK_BYTES:
                self._end_block()

    def add_zeros(self, count: int) -> None:
        if self._block:
            within = min(count, BLOCK_BYTES - len(self._block))
            self.add(ZEROS[:within])
            count -= within
        self._number += count // BLOCK_BYTES
        self._block += ZEROS[: count % BLOCK_BYTES]

    def _end_block(self) -> None:
        if self._block != ZEROS[: len(self._block)]:
            self._sha256.update(self._number.to_bytes(8, "big") + self._block)
        self._number += 1
        self._block = bytearray()

    @property
    def size(self) -> int:
        return self._number * BLOCK_BYTES + len(self._block)

    def hexdigest(self) -> str:
        """To be asked once, at the end."""
        size = self.size
        self._end_block()
        self._sha256.update(size.to_bytes(8, "big"))
        return self._sha256.hexdigest()


def digest_of(handle: int, limit: int, each: Callable[[int, bytes], None]) -> Digest:
    """Of the file up to the limit, or to its end if it became shorter. each: called behind each piece and hole, with
    where it ends and its bytes (none of a hole).
    """
    digest = Digest()
    while digest.size < limit:
        hole, piece = next_piece(handle, digest.size, limit)
        if not hole and not piece:
            break
        digest.add(piece)
        digest.add_zeros(hole)
        each(digest.size, piece)
    return digest
