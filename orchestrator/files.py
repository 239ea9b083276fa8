"""Atomic, durable writes and safe paths; file locks and hashes."""

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
"""Per path, see path_resolution(7)."""


def write_atomic(path: Path, content: bytes | str, mode: int = 0o600) -> None:
    """A reader never sees half a file, even after a crash. A link at `path` is replaced, not followed. Raises
    UsageError, see `resolved`.
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
    """Makes a folder and its parents so that they survive a power cut. Raises UsageError, see `resolved`."""
    resolved(path)
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def resolved(path: Path) -> Path:
    """Raises UsageError for a link of another user on the way, who could redirect our writes."""
    todo, at, links = list(reversed(path.absolute().parts[1:])), Path("/"), 0
    trusted = {os.geteuid(), 0, os.stat("/").st_uid}  # in a user namespace root is the apparent owner of `/`
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
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def folder_beneath(top: Path, parts: Sequence[str]) -> Iterator[int]:
    """The open folder `top/part/part...`, created if absent, following no link below `top`. Raises OSError if another
    kind of file is in the way.
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
    """Creates the folder with mode 0700 if absent. Raises UsageError if it, or a link in its place, belongs to another
    user, who could replace our files.
    """
    resolved(path).mkdir(parents=True, exist_ok=True, mode=0o700)
    if {path.lstat().st_uid, path.stat().st_uid} != {os.geteuid()}:
        raise UsageError(f"{path} belongs to another user", "choose a folder of your own")


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits for the lock; creates `path` if absent."""
    while True:
        path = resolved(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            flock(file, fcntl.LOCK_EX)
            if is_at(file, path):  # else it was removed before we locked it, and other processes would not see our lock
                yield
                return


def is_at(file: IO[Any], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def flock(file: IO[Any], operation: int) -> None:
    """flock(2) with the file's name in its error. Raises BlockingIOError if it is taken."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from error


def hash_file(file: IO[bytes]) -> tuple[hashlib._Hash, int]:
    sha256, size = hashlib.sha256(), 0
    while piece := file.read(BLOCK_BYTES):
        sha256.update(piece)
        size += len(piece)
    return sha256, size
