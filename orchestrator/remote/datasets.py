"""Data sets that were pushed to this host: lists them, and removes the files that came.

Request: {"action": "list" or "remove", "folders": [...]}; each folder counts with the folders directly in it.
Answer: {"sets": [{"folder", "files", "bytes", "kept"}, ...]}. A file is removed only if it is a plain file of ours, as
long as when it came; `kept` counts the others. The list of what came lies in the folder as MARK, written by `receive`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .answer import Refused, reply
from .safe_open import READ, UnsafeError, chosen_folder, holder

MARK = ".orch-pushed.json"
LOCK = ".lock"
MOST_BYTES = 1 << 28


def main(request: dict[str, Any]) -> None:
    reply(request, pushed)


def pushed(request: dict[str, Any]) -> dict[str, Any]:
    folders = [Path(folder).expanduser().absolute() for folder in request["folders"]]
    found = {place: None for folder in folders for place in marked(folder)}
    try:
        return {"sets": [removed(place) if request["action"] == "remove" else listed(place) for place in found]}
    except UnsafeError as error:
        raise Refused(f"{error.filename} {error.strerror}", "another user may write there: look at it") from error


def marked(folder: Path) -> Iterator[Path]:
    below: list[Path] = []
    with contextlib.suppress(OSError):
        below = sorted(place for place in folder.iterdir() if place.is_dir())
    yield from (place for place in (folder, *below) if (place / MARK).is_file())


def listed(folder: Path) -> dict[str, Any]:
    with chosen_folder(folder, make=False) as top:
        sizes = read_mark(top)
    return {"folder": str(folder), "files": len(sizes), "bytes": sum(sizes.values()), "kept": 0}


def removed(folder: Path) -> dict[str, Any]:
    with chosen_folder(folder, make=False) as top, _unused(folder, top):
        sizes = read_mark(top)
        gone = {name for name, size in sizes.items() if _unlinked(top, name, size)}
        parents = {above for name in gone for above in _above(name)}
        for above in sorted(parents, key=len, reverse=True):  # the deepest first
            with contextlib.suppress(OSError), holder(top, above) as (at, last):
                os.rmdir(last, dir_fd=at)
        for name in (MARK, LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=top)
    with contextlib.suppress(OSError):  # it holds other files
        folder.rmdir()
    size = sum(sizes[name] for name in gone)
    return {"folder": str(folder), "files": len(gone), "bytes": size, "kept": len(sizes) - len(gone)}


def read_mark(top: int) -> dict[str, int]:
    """Size of each file that came, by its name; {} without a list. Raises ValueError."""
    try:
        handle = os.open(MARK, READ, dir_fd=top)
    except FileNotFoundError:
        return {}
    with open(handle, "rb") as file:
        sizes = json.loads(file.read(MOST_BYTES))["files"]
    return {str(name): int(size) for name, size in sizes.items() if _is_below(str(name))}


def write_mark(top: int, sizes: dict[str, int]) -> None:
    """Adds these files to the list."""
    known = {}
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # a damaged list begins again
        known = read_mark(top)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(f"{MARK}.new", flags, 0o600, dir_fd=top), "w", encoding="utf-8") as file:
        json.dump({"schema": 1, "files": {**known, **sizes}}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{MARK}.new", MARK, src_dir_fd=top, dst_dir_fd=top)


def _is_below(name: str) -> bool:
    return not any(part in ("", ".", "..") for part in name.split("/"))


def _above(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def _unlinked(top: int, name: str, size: int) -> bool:
    """Whether the file is gone."""
    try:
        with holder(top, name) as (at, last):
            found = os.stat(last, dir_fd=at, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_size != size:
                return False
            os.unlink(last, dir_fd=at)
    except FileNotFoundError:
        return True
    except (OSError, UnsafeError):
        return False
    return True


@contextlib.contextmanager
def _unused(folder: Path, top: int) -> Iterator[None]:
    """Raises Refused while a push, or a rank that unpacks, is at work there."""
    handle = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=top)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise Refused(f"{folder}: a push or a job is at work there", "try again when it has ended") from error
    finally:
        os.close(handle)
