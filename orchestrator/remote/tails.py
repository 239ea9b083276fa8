"""Finds where the last lines of a job's logs begin, for `reader`.

Request: {"workdir", "job", "lines": {name: N}, "since_s"}; N = 0: no lines, null: all; since_s: only lines printed in
this time (null: all). Answer: {"files": {name: [offset, inode, head]}}; head: the first HEAD_BYTES before the offset,
in base64. Missing files and files to be read whole are left out. At most MAX_TAIL_BYTES from the end are read; a longer
line is cut.
"""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path
from typing import Any

from .answer import reply
from .layout import WorkFolder
from .line_times import LineTimes
from .pieces import opened
from .reader import HEAD_BYTES

BLOCK_BYTES = 1 << 16
MAX_TAIL_BYTES = 1 << 22


def main(request: dict[str, Any]) -> None:
    reply(request, tails)


def tails(request: dict[str, Any]) -> dict[str, Any]:
    root, found = WorkFolder(request["workdir"]).job(request["job"]).root, dict[str, Any]()
    for name, lines in request["lines"].items():
        with opened(root / name) as handle:
            if handle is None:
                continue
            size = os.fstat(handle).st_size
            offset = size if lines == 0 else 0 if lines is None else begin_of(handle, size, lines)
            if request["since_s"] is not None and offset < size:
                offset = max(offset, begin_since(handle, size, root / name, time.time() - request["since_s"]))
            if offset:
                head = os.pread(handle, min(offset, HEAD_BYTES), 0)
                found[name] = [offset, os.fstat(handle).st_ino, base64.b64encode(head).decode()]
    return {"files": found}


def begin_since(handle: int, size: int, log: Path, wall: float) -> int:
    """Offset of the first line with output from then or later. If print times are unknown (another program writes the
    log), all or nothing, by the log's last write.
    """
    times = LineTimes(log.with_suffix(".times"))
    if times.is_empty:
        return 0 if os.fstat(handle).st_mtime >= wall else size
    offset = times.since(wall)
    if offset is None or offset >= size:
        return size
    begin = max(0, offset - BLOCK_BYTES)
    cut = os.pread(handle, offset - begin, begin).rfind(b"\n") + 1
    return begin + cut if cut or not begin else offset


def begin_of(handle: int, size: int, lines: int) -> int:
    """Offset of the last `lines` lines; text after the last newline counts as a line."""
    at, left, least = size, lines, max(0, size - MAX_TAIL_BYTES)
    while at > least:
        begin = max(least, at - BLOCK_BYTES)
        block = os.pread(handle, at - begin, begin)
        cut = len(block) - 1 if at == size and block.endswith(b"\n") else len(block)
        while (cut := block.rfind(b"\n", 0, cut)) >= 0:
            left -= 1
            if not left:
                return begin + cut + 1
        at = begin
    return least
