"""Hands a job's files back as a stream of frames, from where the controller already has them.

Request: {"workdir", "job", "ranks": [numbers of this host], "offsets": {name: {"offset", "inode", "head"}}, "follow",
"files": [kinds of files, like "stdout.log"], "limit_bytes", "times"}; without any only the record is sent, and of a
file no more than its first `limit_bytes` (null: all). Of each file the controller has the first `offset` bytes, `inode`
(or null) is which file they came from, and `head` the SHA-256 of the first HEAD_BYTES of them. Each frame is the
request's marker and one JSON line, followed by `size` raw bytes where it says so:

    {"file": "rank-0/stdout.log", "inode": 77, "offset": 0, "size": 4096}   and 4096 bytes
    {"file": ..., "size": 0, "hole": 1048576}                   in place of bytes: so many zeros that take no room
    {"file": ..., "size": 80, "wall": 1764100000.12}            with `times`: of a log, when these bytes were printed
    {"agent": {...}}                                            whenever the supervisor's record changed
    {"beat": 1}                                                 at least every second
    {"error", "remedy"}                                         the disk fails; the last frame
    {"end": {name: {"size", "sha256", "left"}}}                 of all that was handed out, ever, and how many bytes lie
                                                                beyond the limit; the last frame

A file that was cut, replaced or rotated since is another file: it comes again from offset 0. Its size, its inode and
its beginning show that; a file rewritten in place with the same beginning, and longer again before anybody looked,
shows only in the hash at the end. An old log that rotation moved to another name is not looked for.

With `follow` it goes on until the supervisor has spoken its last word (or is gone) and every byte is out, and its end
frame is empty; without, it hands out what was there when it came, however fast the files grow. It ends at once when the
controller leaves (standard input closes), and yields the processor to the job.
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
from .pieces import Out, digest_of, next_piece, opened

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
    """A disk that fails here is reported in words: to read again would only fail again."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "OSError")
        words = f"cannot read {error.filename or job.root}: {error.strerror or error} ({name})"
        out.frame({"error": words, "remedy": "look at this host's disk (`dmesg`); what its ranks print is not seen"})


class LogFile:
    """One file on its way to the controller: how far it is, and whether it is still the same file."""

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
        """have: what the controller has of it, as the request says. limit_bytes: no more than these are handed out.
        times: of a log, say when each piece was printed.
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
        """Sends the next piece, if there is one. only_present: nothing that was not there at the first look."""
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
            hole, piece = next_piece(handle, self.offset, min(end or self._limit, self._limit))
        if not piece and not hole:
            return False
        header = {"file": self.name, "inode": self._inode, "offset": self.offset, "size": len(piece)}
        more = {"hole": hole} if hole else {"wall": wall} if wall else {}
        self._out.frame({**header, **more}, piece)
        room = max(0, HEAD_BYTES - self.offset)
        self._head = (self._head or b"") + (piece[:room] or bytes(min(hole, room)))
        self.offset += len(piece) + hole
        return True

    def _limited(self, size: int) -> int:
        return size if self._limit_bytes is None else min(size, self._limit_bytes)

    def fingerprint(self) -> dict[str, Any] | None:
        """The fingerprint of exactly the bytes that the controller now has: a file that still grows can be checked too.

        None where it has none, or where the file is no longer the one that they came from.
        """
        with opened(self._path) as handle:
            if handle is None or not self.offset or not self._is_same(handle, found := os.fstat(handle)):
                return None
            digest = digest_of(handle, self.offset, lambda end, piece: self._out.beat())
        left = found.st_size - max(digest.size, self._limited(found.st_size))
        return {"size": digest.size, "sha256": digest.hexdigest(), "left": left}

    def _is_same(self, handle: int, found: os.stat_result) -> bool:
        """Whether what was handed out came from this very file."""
        if not self.offset:
            return True
        if self._inode not in (None, found.st_ino) or found.st_size < self.offset:
            return False
        head = os.pread(handle, min(self.offset, HEAD_BYTES), 0)
        if self._head is None and hashlib.sha256(head).hexdigest() == self._head_sha256:
            self._head = head
        return self._head == head


def _hand_out(out: Out, job: JobFolder, files: list[LogFile]) -> None:
    """What is there now. The record is read once, before the files: what it calls final has nothing left to write."""
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
        # A final record alone is not the end: while supervisor or keeper lives, a process of the job is there.
        if not any(sent) and not agent.get("alive"):
            return
        out.beat()
        if not any(sent) and _controller_left(LOOK_S):
            return


def look(job: JobFolder) -> dict[str, Any]:
    """The supervisor's record, as a follower is sent it."""
    return agent_state(job) if job.root.is_dir() else {"state": "lost", "alive": False, "gone": True}


def _controller_left(wait_s: float) -> bool:
    ready, _, _ = select.select([sys.stdin.buffer], [], [], wait_s)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)
