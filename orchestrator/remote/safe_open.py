"""Opens files below a folder step by step (openat(2)) and follows no links, so that no other user can redirect us.

with folder(job.root) as top, holder(top, "src/runs/best.pt") as (at, last):
    handle = os.open(last, READ, dir_fd=at)
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO without a writer must not block
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_LINKS = 40  # as in path_resolution(7)


class UnsafeError(PermissionError):
    """Another user controls this path. strerror: why, filename: which path."""

    def __init__(self, where: Path | str, why: str) -> None:
        super().__init__(errno.EPERM, why, str(where))


@contextlib.contextmanager
def folder(path: Path | str, dir_fd: int | None = None) -> Iterator[int]:
    """Opens a folder that is ours or root's. Raises OSError; UnsafeError if it is a link or another user's."""
    try:
        handle = os.open(path, FOLDER, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(path, dir_fd):
            raise UnsafeError(path, "is a link, and links are not followed there") from error
        raise
    try:
        _refuse_other_owner(path, os.fstat(handle))
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def holder(top: int, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """The open folder that holds this file, and the file's name in it. Raises as `folder` does.

    make: create missing folders; then all of them must not be world-writable.
    """
    *above, last = name.split("/")
    with contextlib.ExitStack() as opened:
        for depth, part in enumerate(above):
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=top)
            try:
                top = opened.enter_context(folder(part, top))
                if make:
                    _refuse_world_writable(part, os.fstat(top))
            except OSError as error:
                error.filename = "/".join(above[: depth + 1])
                raise
        yield top, last


@contextlib.contextmanager
def chosen_folder(path: Path, *, make: bool = True) -> Iterator[int]:
    """Opens the folder at an absolute path that a person chose. make: create it if missing.

    Follows links that are ours or root's. Raises UnsafeError if another user could change where the path leads: their
    folder or link, or a world-writable folder without the sticky bit.
    """
    todo, links = list(reversed(path.parts[1:])), 0
    at, where = os.open("/", _STEP), Path("/")
    try:
        while True:
            _refuse_other_owner(where, os.fstat(at))
            _refuse_world_writable(where, os.fstat(at))
            if not todo:
                break
            part = todo.pop()
            below = _step(at, part, make=make)
            found = os.fstat(below)
            if stat.S_ISLNK(found.st_mode):
                _refuse_other_owner(where / part, found)
                links += 1
                leads_to = Path(os.readlink("", dir_fd=below))
                os.close(below)
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, "too many links", str(path))
                todo += reversed(leads_to.parts[1:] if leads_to.is_absolute() else leads_to.parts)
                if not leads_to.is_absolute():
                    continue
                below, part = os.open("/", _STEP), "/"
            os.close(at)
            at, where = below, where / part
        handle = os.open(".", FOLDER, dir_fd=at)
    finally:
        os.close(at)
    try:
        yield handle
    finally:
        os.close(handle)


def _step(at: int, part: str, *, make: bool) -> int:
    try:
        return os.open(part, _STEP, dir_fd=at)
    except FileNotFoundError:
        if not make:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o700, dir_fd=at)
        return os.open(part, _STEP, dir_fd=at)


def _is_link(path: Path | str, dir_fd: int | None) -> bool:
    return stat.S_ISLNK(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode)


def is_trusted(uid: int) -> bool:
    # Ours or root's. In a user namespace, the owner of `/` is root.
    return uid in (os.getuid(), 0, os.stat("/").st_uid)


def _refuse_other_owner(where: Path | str, found: os.stat_result) -> None:
    if not is_trusted(found.st_uid):
        raise UnsafeError(where, "belongs to another user")


def _refuse_world_writable(where: Path | str, found: os.stat_result) -> None:
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise UnsafeError(where, "is a folder in which every user may write")
