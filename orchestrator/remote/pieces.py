"""Helpers of `reader` and `sender`: writing frames, opening our own files, hashing."""

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

from .answer import wind

BEAT_S = 1.0
CHUNK_BYTES = 1 << 18


class Out:
    """marker: begins each frame, since a shell may print to the stream too."""

    def __init__(self, marker: str) -> None:
        self._marker = marker.encode()
        self._beat_due = 0.0

    def frame(self, header: dict[str, Any], payload: bytes = b"") -> None:
        wind()
        sys.stdout.buffer.write(self._marker + json.dumps(header).encode() + b"\n" + payload)
        sys.stdout.buffer.flush()

    def beat(self) -> None:
        if time.monotonic() > self._beat_due:
            self._beat_due = time.monotonic() + BEAT_S
            self.frame({"beat": 1})


@contextlib.contextmanager
def opened(path: Path) -> Any:
    """A descriptor; None unless it is a regular file of our own. Neither the file nor its folder may be a link."""
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


def hash_pieces(handle: int, limit: int, each: Callable[[int, bytes], None]) -> tuple[int, str]:
    """Size and SHA-256 up to the limit, or to its end if it shrank. each: called per piece with its end and bytes."""
    sha256, at = hashlib.sha256(), 0
    while at < limit and (piece := os.pread(handle, min(CHUNK_BYTES, limit - at), at)):
        sha256.update(piece)
        at += len(piece)
        each(at, piece)
    return at, sha256.hexdigest()
