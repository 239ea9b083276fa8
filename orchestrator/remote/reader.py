"""Streams a job's logs, metrics and supervisor record (`sender`: output files) to the controller.

Request: {"workdir", "job", "ranks": [numbers of this host], "offsets": {name: {"offset", "inode", "head"}}, "follow",
"files": [kinds of files, like "stdout.log"], "limit_bytes", "times"}. The controller has the first `offset` bytes of a
file with this `inode` (or null), and `head` is the SHA-256 of their first HEAD_BYTES. At most `limit_bytes` of each
file are sent (null: all). A frame is the request's marker and one JSON line, then `size` raw bytes if it has a size:

    {"file": "rank-0/stdout.log", "inode": 77, "offset": 0, "size": 4096}   and 4096 bytes
    {"file": ..., "size": 80, "wall": 1764100000.12}            with `times`: print time of these bytes of a log
    {"agent": {...}}                                            whenever the supervisor's record changed
    {"beat": 1}                                                 at least every second
    {"error", "remedy"}                                         the disk fails; the last frame
    {"end": {name: {"size", "sha256", "left"}}}                 of all bytes ever sent, and bytes beyond the limit; the
                                                                last frame, empty with `follow`

A truncated, replaced or rotated file is sent again from offset 0; size, inode or beginning reveals it. A file rewritten
in place with the same beginning, and longer, is only revealed by the final hash. Rotated logs are not sent.

With `follow` it ends after the final record, when every byte is sent; without, it sends what exists at its start. It
ends at once if the controller leaves (standard input closes).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .agent import agent_state
from .layout import JobFolder, WorkFolder
from .line_times import LineTimes
from .pieces import CHUNK_BYTES, Out, hash_pieces, opened

HEAD_BYTES = 1 << 12
LOOK_S = 0.1
NICE = 10
RANK_FILES = ("stdout.log", "stderr.log", "metrics.jsonl")
NODE_FILES = ("supervisor.log", "torchrun.log", "prepare.log", "gpu.jsonl")


def main(request: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    job = WorkFolder(request["workdir"]).job(request["job"])
    out = Out(request["marker"])
    kinds, limit, offsets = request["files"], request["limit_bytes"], request["offsets"]
    names = [f"rank-{rank}/{name}" for rank in request["ranks"] for name in RANK_FILES if name in kinds]
    names += [name for name in NODE_FILES if name in kinds]
    files = [LogFile(out, job.root, name, offsets.get(name), limit, times=request["times"]) for name in names]
    with contextlib.suppress(BrokenPipeError), _reported(out, job):
        if request["follow"]:
            _follow(out, job, files)
            out.frame({"end": {}})
        else:
            _hand_out(out, job, files)
            found = {file.name: file.fingerprint() for file in files}
            out.frame({"end": {name: sums for name, sums in found.items() if sums}})


@contextlib.contextmanager
def _reported(out: Out, job: JobFolder) -> Iterator[None]:
    # Reports a failing disk as the last frame: reading again would fail too.
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "OSError")
        words = f"cannot read {error.filename or job.root}: {error.strerror or error} ({name})"
        out.frame({"error": words, "remedy": "look at this host's disk (`dmesg`); what its ranks print is not seen"})


class LogFile:
    def __init__(
        self,
        out: Out,
        root: Path,
        name: str,
        have: dict[str, Any] | None,
        limit_bytes: int | None,
        *,
        times: bool = False,
    ) -> None:
        """have: the controller's part, as in the request. limit_bytes: most bytes to send. times: send print times of
        log pieces.
        """
        have = have or {"offset": 0, "inode": None, "head": None}
        self.name = name
        self._out = out
        self.offset = int(have["offset"])
        self._path = root / name
        self._inode: int | None = have["inode"]
        self._head_sha256: str | None = have["head"]
        self._head: bytes | None = None if self.offset else b""
        self._limit_bytes = limit_bytes
        self._limit: int | None = None
        self._times = LineTimes(self._path.with_suffix(".times")) if times and name.endswith(".log") else None

    def send_new(self, *, only_present: bool = False) -> bool:
        """Sends the next piece, if any. only_present: not beyond the file's size at the first call."""
        with opened(self._path) as handle:
            if handle is None:
                return False
            found = os.fstat(handle)
            if not self._is_same(handle, found):
                self.offset, self._head, self._limit = 0, b"", None
                self._times = self._times and LineTimes(self._path.with_suffix(".times"))
            if self._limit is None or not only_present:
                self._limit = self._limited(found.st_size)
            self._inode = found.st_ino
            is_new = self.offset < self._limit
            wall, end = self._times.at(self.offset) if self._times and is_new else (None, None)
            size = max(0, min(end or self._limit, self._limit) - self.offset)
            piece = os.pread(handle, min(CHUNK_BYTES, size), self.offset)
        if not piece:
            return False
        header = {"file": self.name, "inode": self._inode, "offset": self.offset, "size": len(piece)}
        self._out.frame(header | ({"wall": wall} if wall else {}), piece)
        self._head = (self._head or b"") + piece[: max(0, HEAD_BYTES - self.offset)]
        self.offset += len(piece)
        return True

    def _limited(self, size: int) -> int:
        return size if self._limit_bytes is None else min(size, self._limit_bytes)

    def fingerprint(self) -> dict[str, Any] | None:
        """Covers exactly the bytes that the controller has, so that growing files can be checked. None without bytes,
        or if they came from another file.
        """
        with opened(self._path) as handle:
            if handle is None or not self.offset or not self._is_same(handle, found := os.fstat(handle)):
                return None
            size, sha256 = hash_pieces(handle, self.offset, lambda end, piece: self._out.beat())
        return {"size": size, "sha256": sha256, "left": found.st_size - max(size, self._limited(found.st_size))}

    def _is_same(self, handle: int, found: os.stat_result) -> bool:
        if not self.offset:
            return True
        if self._inode not in (None, found.st_ino) or found.st_size < self.offset:
            return False
        head = os.pread(handle, min(self.offset, HEAD_BYTES), 0)
        if self._head is None and hashlib.sha256(head).hexdigest() == self._head_sha256:
            self._head = head
        return self._head == head


def _hand_out(out: Out, job: JobFolder, files: list[LogFile]) -> None:
    # Sends all existing bytes. The record is read before the files: if it is final, the files are complete.
    out.frame({"agent": look(job)})
    while any([file.send_new(only_present=True) for file in files]):
        out.beat()


def _follow(out: Out, job: JobFolder, files: list[LogFile]) -> None:
    agent: dict[str, Any] = {}
    while True:
        latest = look(job)
        sent = [file.send_new() for file in files]
        if latest != agent:
            agent = latest
            out.frame({"agent": agent})
        # After the final record, supervisor or keeper may still be alive, and processes of the job with them.
        if not any(sent) and not agent.get("alive"):
            return
        out.beat()
        if not any(sent) and _controller_left(LOOK_S):
            return


def look(job: JobFolder) -> dict[str, Any]:
    return agent_state(job) if job.root.is_dir() else {"state": "lost", "alive": False, "gone": True}


def _controller_left(wait_s: float) -> bool:
    ready, _, _ = select.select([sys.stdin.buffer], [], [], wait_s)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)
