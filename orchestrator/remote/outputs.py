"""Lists the files that jobs wrote on this host: `checkpoints/`, and new or changed files in `src/`.

Request: {"workdir", "jobs": [ids]}. Output (see `progress_stream`), in parts:

    {"job": ID, "files": [[name, size, mtime_ns, inode], ...]}     names relative to the job's folder
    {"job": ID, "files": ..., "foreign": [names]}                  of these files, copies of another host's
    {"job": ID, "skipped": {"links": 1, ...}}                      entries that are not delivered
    {"job": ID, "gone": 1}                                         this host has no such job
    {"end": {}}

Checkpoints in a folder outside (setting `checkpoint_dir`) are named `checkpoint_dir/...`. Links are never followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .layout import JobFolder, WorkFolder
from .progress_stream import ProgressStream, serve
from .safe_open import folder

ELSEWHERE = "checkpoint_dir"
CHECKPOINT = re.compile(r"step-\d{9}\.pt")
UNFINISHED = re.compile(r"\.step-\d{9}\.pt\.part")
MAX_FILES = 100_000
MAX_DEPTH = 64
MAX_NAME = 1024
PART_BYTES = 1 << 17
NICE = 10


def main(request: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    serve(request, list_all)


def list_all(request: dict[str, Any], progress: ProgressStream) -> dict[str, Any]:
    work = WorkFolder(request["workdir"])
    for job in [work.job(name) for name in request["jobs"]]:
        if not job.root.is_dir():
            progress.send({"job": job.id, "gone": 1})
            continue
        found = FoundFile(job)
        part, size = list[list[Any]](), 0
        for row in found.files():
            part.append(row)
            size += 12 * len(row[0]) + 80  # longest JSON form
            if size > PART_BYTES:
                _send_part(progress, found, part)
                part, size = [], 0
        _send_part(progress, found, part)
        progress.send({"job": job.id, "skipped": {why: count for why, count in found.skipped.items() if count}})
    return {}


def _send_part(progress: ProgressStream, found: FoundFile, part: list[list[Any]]) -> None:
    foreign = [row[0] for row in part if found.received.get(row[0]) == row[1:]]
    progress.send({"job": found.job.id, "files": part, **({"foreign": foreign} if foreign else {})})


class FoundFile:
    def __init__(self, job: JobFolder) -> None:
        self.job = job
        self.received = read_marks(job.received)
        self._shipped = read_marks(job.shipped)
        self._count = 0
        self.skipped = {"links": 0, "special": 0, "foreign": 0, "odd_names": 0, "more": 0}

    def files(self) -> Iterator[list[Any]]:
        for part in ("checkpoints", "src"):
            with contextlib.suppress(OSError), folder(self.job.root) as root, folder(part, root) as top:
                yield from self._below(top, part)
        elsewhere = checkpoint_folder(self.job)
        if elsewhere:
            with contextlib.suppress(OSError), folder(elsewhere) as top:
                yield from self._below(top, ELSEWHERE, only=CHECKPOINT)

    def _below(self, top: int, prefix: str, only: re.Pattern[str] | None = None) -> Iterator[list[Any]]:
        with os.scandir(top) as entries:
            for entry in entries:
                name = f"{prefix}/{entry.name}"
                if only and not only.fullmatch(entry.name):
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:  # gone since
                    continue
                if why := self._not_ours(name, found):
                    self.skipped[why] += 1
                elif stat.S_ISDIR(found.st_mode):
                    yield from self._in_folder(top, entry.name, name)
                elif not UNFINISHED.fullmatch(entry.name) and self._shipped.get(name) != mark(found):
                    self._count += 1
                    if self._count > MAX_FILES:
                        self.skipped["more"] += 1
                        continue
                    yield [name, *mark(found)]

    def _in_folder(self, top: int, own_name: str, name: str) -> Iterator[list[Any]]:
        if own_name != "__pycache__":
            with contextlib.suppress(OSError), folder(own_name, top) as below:
                yield from self._below(below, name)

    def _not_ours(self, name: str, found: os.stat_result) -> str | None:
        if stat.S_ISLNK(found.st_mode):
            return "links"
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            return "special"
        if found.st_uid != os.getuid():
            return "foreign"
        is_odd = len(name) > MAX_NAME or name.count("/") >= MAX_DEPTH or not name.isprintable()
        return "odd_names" if is_odd else None


def mark(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def read_marks(path: Path) -> dict[str, list[int]]:
    """Name -> mark of each file as shipped, or as received; {} if not recorded."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def checkpoint_folder(job: JobFolder) -> Path | None:
    settings = job.read_node().get("settings") or {}
    named = settings.get("checkpoint_dir")
    if not named or not isinstance(named, str):
        return None
    path = Path(os.path.normpath(job.src / Path(named).expanduser()))
    return None if path.is_relative_to(job.root) else path
