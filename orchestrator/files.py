"""Writing files so that a reader, or a crash, never meets half of one; and the digest of one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from orchestrator.errors import UsageError

BLOCK_BYTES = 1 << 20
ZEROS = bytes(BLOCK_BYTES)
MAX_LINKS = 40
"""On one path, as path_resolution(7) has it."""


def write_atomic(path: Path, content: bytes | str, mode: int = 0o600) -> None:
    """Writes to a temporary file beside `path`, fsyncs it, renames it, fsyncs the folder. A link in its place is
    replaced, not followed. Raises UsageError: see `resolved`.
    """
    data = content.encode() if isinstance(content, str) else content
    make_folder(path.parent)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, each so that a power cut cannot take it back with what is in it. Raises
    UsageError: see `resolved`.
    """
    resolved(path)
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def resolved(path: Path) -> Path:
    """Where this path leads. Raises UsageError for a link of another user on the way: what we wrote through it would
    go where they want.
    """
    todo, at, links = list(reversed(path.absolute().parts[1:])), Path("/"), 0
    trusted = {os.geteuid(), 0, os.stat("/").st_uid}  # in a user namespace root is whoever `/` seems to belong to
    while todo:
        part = todo.pop()
        below = at.parent if part == ".." else at / part
        found = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = below.lstat()
        if not found or not stat.S_ISLNK(found.st_mode):
            at = below
            continue
        if found.st_uid not in trusted:
            raise UsageError(f"{below} is a link that belongs to another user", "remove it, or choose another place")
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        leads_to = Path(os.readlink(below))
        at = Path("/") if leads_to.is_absolute() else at
        todo += reversed(leads_to.parts[1:] if leads_to.is_absolute() else leads_to.parts)
    return at


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, outlast a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def folder_beneath(top: Path, parts: Sequence[str]) -> Iterator[int]:
    """The open folder `top/part/part...`, made where it is not there. Below `top` no link is followed.

    Raises OSError where something else than a folder is in the way.
    """
    make_folder(top)
    handle = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=handle)
                os.fsync(handle)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = below
        yield handle
    finally:
        os.close(handle)


def own_folder(path: Path) -> None:
    """Makes the folder, mode 0700, where there is none. Raises UsageError where it, or a link in its place, is somebody
    else's: what we write there, they could replace."""
    resolved(path).mkdir(parents=True, exist_ok=True, mode=0o700)
    if {path.lstat().st_uid, path.stat().st_uid} != {os.geteuid()}:
        raise UsageError(f"{path} belongs to another user", "choose a folder of your own")


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive flock on `path` (made when absent); waits for it."""
    while True:
        path = resolved(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            flock(file, fcntl.LOCK_EX)
            if is_at(file, path):  # else somebody removed it before we had it: nobody else would meet our lock
                yield
                return


def is_at(file: IO[Any], path: Path) -> bool:
    """Whether this open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def flock(file: IO[Any], operation: int) -> None:
    """flock(2), whose error names the file, too. Raises BlockingIOError where it is taken."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from error


class Digest:
    """SHA-256 of a file of any size, for which its holes cost nothing: of its blocks of BLOCK_BYTES, each behind its
    number, without those that hold only zeros; and of its size. `remote/pieces.py` computes the same.
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

    def hexdigest(self) -> str:
        """To be asked once, at the end."""
        size = self._number * BLOCK_BYTES + len(self._block)
        self._end_block()
        self._sha256.update(size.to_bytes(8, "big"))
        return self._sha256.hexdigest()


def digest_of(file: IO[bytes]) -> tuple[Digest, int]:
    """Of what the file holds now, and how many bytes that is."""
    digest, at, size = Digest(), 0, os.fstat(file.fileno()).st_size
    while at < size:
        data_at = _data_after(file.fileno(), at, size)
        digest.add_zeros(data_at - at)
        piece = os.pread(file.fileno(), min(BLOCK_BYTES, size - data_at), data_at)
        digest.add(piece)
        at = data_at + len(piece)
        if not piece and data_at < size:
            break  # it became shorter
    return digest, at


def _data_after(handle: int, at: int, size: int) -> int:
    """Where the next bytes lie that take room on the disk; the size if there are none."""
    try:
        return os.lseek(handle, at, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else at  # or this file system has no holes
