"""Files beneath a folder, opened step by step: no link on the way is followed, whoever made it.

    with folder(job.root) as top, holder(top, "src/runs/best.pt") as (at, last):
        handle = os.open(last, READ, dir_fd=at)

Each step is taken from the folder that the step before it opened (openat(2)), so nobody who renames or replaces a name
meanwhile leads us elsewhere. A path that a person chose is walked the same way (`chosen_folder`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO without a writer must not hold us
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_LINKS = 40
"""On one path, as path_resolution(7) has it."""


class UnsafeError(PermissionError):
    """Somebody else decides what lies there. strerror: why, filename: where."""

    def __init__(self, where: Path | str, why: str) -> None:
        super().__init__(errno.EPERM, why, str(where))


@contextlib.contextmanager
def folder(path: Path | str, dir_fd: int | None = None) -> Iterator[int]:
    """An open folder of our own, or of root's. Raises OSError, UnsafeError where it is a link or another user's."""
    try:
        handle = os.open(path, FOLDER, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(path, dir_fd):
            raise UnsafeError(path, "is a link, and links are not followed there") from error
        raise
    try:
        _refuse_strangers(path, os.fstat(handle))
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def holder(top: int, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """The open folder that holds this file, and the file's own name in it. Raises as `folder` does.

    make: folders that are not there; then none may be one in which everybody writes.
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
                    _refuse_open_house(part, os.fstat(top))
            except OSError as error:
                error.filename = "/".join(above[: depth + 1])
                raise
        yield top, last


@contextlib.contextmanager
def chosen_folder(path: Path, *, make: bool = True) -> Iterator[int]:
    """The open folder at an absolute path that a person chose. make: if it is not there.

    Links on the way are followed where they are ours or root's. Raises UnsafeError where another user has a say in
    where the path leads: a folder or link of theirs, or a folder in which everybody may rename what is not theirs.
    """
    todo, links = list(reversed(path.parts[1:])), 0
    at, where = os.open("/", _STEP), Path("/")
    try:
        while True:
            _refuse_strangers(where, os.fstat(at))
            _refuse_open_house(where, os.fstat(at))
            if not todo:
                break
            part = todo.pop()
            below = _step(at, part, make=make)
            found = os.fstat(below)
            if stat.S_ISLNK(found.st_mode):
                _refuse_strangers(where / part, found)
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
    """Ours, or root's: in a user namespace root is whoever `/` seems to belong to."""
    return uid in (os.getuid(), 0, os.stat("/").st_uid)


def _refuse_strangers(where: Path | str, found: os.stat_result) -> None:
    if not is_trusted(found.st_uid):
        raise UnsafeError(where, "belongs to another user")


def _refuse_open_house(where: Path | str, found: os.stat_result) -> None:
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise UnsafeError(where, "is a folder in which everybody may write")
