"""Hands a job's files back as a stream of frames, from the offsets that the controller already has.

Request: {"workdir", "job", "ranks": [numbers of this host], "offsets": {name: bytes}, "follow": bool, "files": bool};
without `files` only the record is told. Each frame is one JSON line, followed by `size` raw bytes where it says so:

    {"file": "rank-0/stdout.log", "offset": 0, "size": 4096}   and 4096 bytes
    {"agent": {...}}                                            whenever the supervisor's record changed
    {"beat": 1}                                                 at least every second
    {"end": {name: {"size", "sha256"}}}                         of all that was handed out, ever; the last frame

With `follow` it goes on until the supervisor has spoken its last word (or is gone) and every byte is out; without, it
hands out what is there. It ends at once when the controller leaves (standard input closes).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import stat
import sys
import time
from pathlib import Path
from typing import Any

from .agent import look
from .layout import Job, Work

CHUNK_BYTES = 1 << 18
LOOK_S = 0.1
BEAT_S = 1.0
RANK_FILES = ("stdout.log", "stderr.log", "metrics.jsonl")
NODE_FILES = ("supervisor.log", "torchrun.log", "prepare.log", "gpu.jsonl")


def main(request: dict[str, Any]) -> None:
    job = Work(request["workdir"]).job(request["job"])
    names = [f"rank-{rank}/{name}" for rank in request["ranks"] for name in RANK_FILES] + list(NODE_FILES)
    offsets = {name: int(request["offsets"].get(name, 0)) for name in names if request["files"]}
    with contextlib.suppress(BrokenPipeError):
        _stream(job, offsets, request["follow"])
        _frame({"end": {name: _fingerprint(job.root / name, size) for name, size in offsets.items() if size}})


def _stream(job: Job, offsets: dict[str, int], follow: bool) -> None:
    agent: dict[str, Any] = {}
    beat_due = 0.0
    while True:
        # The record is read before the files: what it calls final has nothing left to write.
        latest = look(job) if job.root.is_dir() else {"state": "lost", "alive": False}
        sent = [_send_new(job.root, name, offsets) for name in offsets]
        if latest != agent:
            agent = latest
            _frame({"agent": agent})
        # A final record alone is not the end: while supervisor or keeper lives, a process of the job is there.
        over = not agent.get("alive")
        if not any(sent) and (over or not follow):
            return
        if time.monotonic() > beat_due:
            beat_due = time.monotonic() + BEAT_S
            _frame({"beat": 1})
        if not any(sent) and _controller_left(LOOK_S):
            return


def _send_new(root: Path, name: str, offsets: dict[str, int]) -> bool:
    """The next piece of one file, if there is one. Only regular files of our own: a link leads elsewhere."""
    try:
        handle = os.open(root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            return False
        if found.st_size < offsets[name]:
            offsets[name] = 0  # it was cut or replaced: the controller sees the offset go back, and starts anew
        file.seek(offsets[name])
        piece = file.read(CHUNK_BYTES)
    if piece:
        _frame({"file": name, "offset": offsets[name], "size": len(piece)}, piece)
        offsets[name] += len(piece)
    return bool(piece)


def _fingerprint(path: Path, size: int) -> dict[str, Any]:
    """Of exactly the bytes that the controller now has: a file that still grows can be checked too."""
    digest, left = hashlib.sha256(), size
    with contextlib.suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        while left and (piece := file.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
    return {"size": size - left, "sha256": digest.hexdigest()}


def _controller_left(wait_s: float) -> bool:
    ready, _, _ = select.select([sys.stdin.buffer], [], [], wait_s)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def _frame(header: dict[str, Any], payload: bytes = b"") -> None:
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + payload)
    sys.stdout.buffer.flush()
