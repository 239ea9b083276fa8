"""Hands files that a job wrote to the controller, one after the other, as a stream of frames.

Request: {"workdir", "job", "files": [[name, size, mtime_ns, inode, offset], ...]}: names, sizes and marks as `outputs`
reported them; the first `offset` bytes are at the controller. Each frame is the request's marker and one JSON line,
followed by `size` raw bytes:

    {"file": NAME, "inode": 77, "offset": 0, "size": 4096}      and 4096 bytes
    {"file": NAME, "inode": 77, "offset": 0, "size": 0, "hole": 1048576}      so many zeros that take no room
    {"whole": NAME, "size", "mtime_ns", "sha256"}               all of this file is out
    {"left": NAME, "why"}                                       this file cannot be had now
    {"beat": 1}                                                 at least every second
    {"end": {}}                                                 the last frame

A file that is no longer as reported begins again, at offset 0. One that changes while it is read is read again, a few
times. The SHA-256 is of all of its bytes, those that the controller had before included.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from pathlib import Path
from typing import Any

from .beneath import READ, folder, holder
from .layout import JobFolder, WorkFolder
from .outputs import ELSEWHERE, checkpoint_folder, mark
from .pieces import Out, add_zeros, next_piece

TRIES = 3
AGAIN_S = 0.2
NICE = 10


def main(request: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    job = WorkFolder(request["workdir"]).job(request["job"])
    out = Out(request["marker"])
    with contextlib.suppress(BrokenPipeError):
        for name, size, mtime_ns, inode, offset in request["files"]:
            try:
                send(out, job, name, [size, mtime_ns, inode], offset)
            except BrokenPipeError:
                raise
            except OSError as error:
                gone = isinstance(error, FileNotFoundError)
                out.frame({"left": name, "why": "is gone" if gone else f"cannot be read: {error.strerror or error}"})
        out.frame({"end": {}})


def send(out: Out, job: JobFolder, name: str, before: list[int], offset: int) -> None:
    """Raises OSError where the file cannot be opened or read."""
    top, _, below = name.partition("/")
    where: Path | None = checkpoint_folder(job) if top == ELSEWHERE else job.root
    if where is None:
        raise FileNotFoundError(2, "no such folder", name)
    with folder(where) as root, holder(root, below if top == ELSEWHERE else name) as (at, last):
        for _ in range(TRIES):
            handle = os.open(last, READ, dir_fd=at)
            try:
                found = os.fstat(handle)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                    raise PermissionError(1, "it is no plain file of this user", name)
                sha256 = send_bytes(out, name, handle, found, offset if mark(found) == before else 0)
                if mark(os.fstat(handle)) == mark(found):
                    out.frame({"whole": name, "size": found.st_size, "mtime_ns": found.st_mtime_ns, "sha256": sha256})
                    return
            finally:
                os.close(handle)
            time.sleep(AGAIN_S)  # whoever writes it may be done then
    out.frame({"left": name, "why": "changes while it is read: pull again when the job is at rest"})


def send_bytes(out: Out, name: str, handle: int, found: os.stat_result, offset: int) -> str:
    """All bytes from the offset on, as many as there were at the first look. Gives the SHA-256 of the whole file."""
    digest, at = hashlib.sha256(), 0
    while at < found.st_size:
        hole, piece = next_piece(handle, at, offset if at < offset else found.st_size)
        if not hole and not piece:
            return ""  # it became shorter
        if at >= offset:
            header = {"file": name, "inode": found.st_ino, "offset": at, "size": len(piece)}
            out.frame({**header, "hole": hole} if hole else header, piece)
        digest.update(piece)
        add_zeros(digest, hole)
        at += hole + len(piece)
        out.beat()
    return digest.hexdigest()
