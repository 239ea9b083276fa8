"""Streams a job's output files to the controller as frames, one file after the other.

Request: {"workdir", "job", "files": [[name, size, mtime_ns, inode, offset], ...]} as `outputs` reported them; the
controller has the first `offset` bytes. A frame is the request's marker and one JSON line, then `size` raw bytes:

    {"file": NAME, "inode": 77, "offset": 0, "size": 4096}      and 4096 bytes
    {"whole": NAME, "size", "mtime_ns", "sha256"}               the file is complete; sha256 of all its bytes
    {"left": NAME, "why"}                                       this file cannot be sent now
    {"beat": 1}                                                 at least every second
    {"end": {}}                                                 the last frame

A file that has changed since the report begins at offset 0. A file that changes while it is read is tried again after
all others, TRIES times in all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from pathlib import Path
from typing import Any

from .layout import JobFolder, WorkFolder
from .outputs import ELSEWHERE, checkpoint_folder, mark
from .pieces import CHUNK_BYTES, Out
from .safe_open import READ, folder, holder

TRIES = 3
AGAIN_S = 0.2
LOOK_BYTES = 16 << 20  # bytes between two checks for changes, which make the rest useless
NICE = 10


def main(request: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    job = WorkFolder(request["workdir"]).job(request["job"])
    out = Out(request["marker"])
    with contextlib.suppress(BrokenPipeError):
        files = request["files"]
        for turn in range(TRIES):
            if turn and files:
                time.sleep(AGAIN_S)  # the writer may have finished by then
            files = [row for row in files if not _is_out(out, job, row)]
        for name, *_ in files:
            out.frame({"left": name, "why": "changes while it is read: pull again when the job is at rest"})
        out.frame({"end": {}})


def _is_out(out: Out, job: JobFolder, row: list[Any]) -> bool:
    name, size, mtime_ns, inode, offset = row
    try:
        return send(out, job, name, [size, mtime_ns, inode], offset)
    except BrokenPipeError:
        raise
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        out.frame({"left": name, "why": "is gone" if gone else f"cannot be read: {error.strerror or error}"})
        return True


def send(out: Out, job: JobFolder, name: str, before: list[int], offset: int) -> bool:
    """False if the file changed meanwhile. Raises OSError if it cannot be opened or read."""
    top, _, below = name.partition("/")
    where: Path | None = checkpoint_folder(job) if top == ELSEWHERE else job.root
    if where is None:
        raise FileNotFoundError(2, "no such folder", name)
    with folder(where) as root, holder(root, below if top == ELSEWHERE else name) as (at, last):
        handle = os.open(last, READ, dir_fd=at)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                raise PermissionError(1, "it is no plain file of this user", name)
            sha256 = send_bytes(out, name, handle, found, offset if mark(found) == before else 0)
            if not sha256 or mark(os.fstat(handle)) != mark(found):
                return False
            out.frame({"whole": name, "size": found.st_size, "mtime_ns": found.st_mtime_ns, "sha256": sha256})
            return True
        finally:
            os.close(handle)


def send_bytes(out: Out, name: str, handle: int, found: os.stat_result, offset: int) -> str:
    """Sends from the offset up to the size in `found`. Returns the whole file's SHA-256; "" if the file changed."""
    sha256, at, look_at = hashlib.sha256(), 0, LOOK_BYTES
    while at < found.st_size:
        end = offset if at < offset else found.st_size
        piece = os.pread(handle, min(CHUNK_BYTES, end - at), at)
        if not piece:
            return ""  # it became shorter
        if at >= offset:
            out.frame({"file": name, "inode": found.st_ino, "offset": at, "size": len(piece)}, piece)
        sha256.update(piece)
        at += len(piece)
        out.beat()
        if at >= look_at:
            look_at = at + LOOK_BYTES
            if mark(os.fstat(handle)) != mark(found):
                return ""
    return sha256.hexdigest()
