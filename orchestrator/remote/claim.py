"""Locks a work folder while files are created or removed in it. The lock is on its mark file.

with claimed(work):                 # creates and marks the folder if needed; a shared lock
    ...
with alone_in(work, 10) as is_locked:   # exclusive; False if others kept it locked for 10 s
    ...
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from .answer import Refused
from .layout import WorkFolder
from .workfolder import MARK, content, danger, unfit

CLAIM_S = 30.0  # how long to wait for an `orch down` that is removing files
_PAUSE_S = 0.02


@contextlib.contextmanager
def claimed(work: WorkFolder) -> Iterator[None]:
    """Keeps shared files from being removed. Raises Refused if the folder must not be used."""
    handle = _hold(work, fcntl.LOCK_SH, CLAIM_S)
    if handle is None:
        raise Refused(f"`orch down` is at work in {work.root}", "try again")
    try:
        for folder in (work.jobs, work.codes, work.venvs, work.locks, work.handovers):
            if found := danger(folder):
                raise Refused(*found)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def alone_in(work: WorkFolder, wait_s: float) -> Iterator[bool]:
    """Yields whether we hold the folder exclusively. The folder has to be ours."""
    handle = _hold(work, fcntl.LOCK_EX, wait_s) if content(work.root) == "ours" else None
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _hold(work: WorkFolder, kind: int, wait_s: float) -> int | None:
    deadline = time.monotonic() + wait_s
    while True:
        handle = _open_mark(work)
        try:
            if _lock(handle, kind, deadline) and _is_at(handle, work.root / MARK):
                _refuse_unfit(work)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if time.monotonic() > deadline:
            return None


def _open_mark(work: WorkFolder) -> int:
    while True:
        _refuse_unfit(work)  # before anything is written there
        with contextlib.suppress(FileNotFoundError):  # `orch down` removed it just now
            _make(work.root)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(work.root / MARK, flags, 0o600)
            if not os.fstat(handle).st_size:
                os.write(handle, json.dumps({"schema": 1, "what": "work folder of orch"}).encode() + b"\n")
            return handle


def _make(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # also raised if it is removed while `mkdir` checks it
        if os.path.lexists(root) and not root.is_dir():
            raise


def _refuse_unfit(work: WorkFolder) -> None:
    if found := unfit(work.root):
        raise Refused(*found)


def _lock(handle: int, kind: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False
