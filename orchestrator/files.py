"""Writes files so that a reader never meets half a file, even after a crash; and hashes files."""

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


def hash_file(file: IO[bytes]) -> tuple[hashlib._Hash, int]:
    """The SHA-256 of the file so far, and its size; the file is read to its end."""
    sha256, size = hashlib.sha256(), 0
    while piece := file.read(BLOCK_BYTES):
        sha256.update(piece)
        size += len(piece)
    return sha256, size
