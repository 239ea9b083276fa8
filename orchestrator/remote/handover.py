"""Collects files of an earlier job for a new job on this host before `prepare` runs.

By `action`:

    look    {"workdir", "job", "code", "shipped": {name: sha256}} of the earlier job -> {"alive": it still runs here,
            "replaced": names whose shipped file was another one then}
    copy    {"workdir", "job", "owner", "cluster", "from": {"workdir", "job"}, "files": [[name, size, mtime_ns, inode]],
            "needed_bytes"}: copies this host's own files -> {"end": {"folder"}} (see `progress_stream`): where
            `receive` puts the files of other hosts

The files wait in `<workdir>/handover/<new job>/` under their names in the job's folder until `prepare` moves them. Each
is complete and verified. `undo` and `fence` remove the folder of a failed start, `down` a forgotten folder. The earlier
job's files are copied, never linked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .agent import agent_state
from .answer import Refused, reply
from .claim import claimed
from .layout import JobFolder, WorkFolder, write_json
from .outputs import mark
from .pieces import hash_pieces
from .progress_stream import ProgressStream, serve
from .safe_open import READ, folder, holder
from .workfolder import danger

SPARE_BYTES = 64 << 20  # left free on the disk
NICE = 10
_WRITE = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_HALF = ".orch-copy.part"


def main(request: dict[str, Any]) -> None:
    if request["action"] == "look":
        return reply(request, look)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    return serve(request, copy)


def look(request: dict[str, Any]) -> dict[str, Any]:
    work = WorkFolder(request["workdir"])
    job, code = work.job(request["job"]), work.code(request["code"])
    alive = job.root.is_dir() and bool(agent_state(job).get("alive"))
    shipped = request["shipped"].items()
    return {"alive": alive, "replaced": [name for name, sha256 in shipped if _sha256(code / name) != sha256]}


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def copy(request: dict[str, Any], progress: ProgressStream) -> dict[str, Any]:
    work, source = WorkFolder(request["workdir"]), request["from"]
    with claimed(work):
        ready = work.handover(request["job"])
        if found := danger(ready.root):
            raise Refused(*found)
        free = shutil.disk_usage(work.root).free
        if request["needed_bytes"] + SPARE_BYTES > free:
            needed = f"the files of {source['job']} need {request['needed_bytes'] + SPARE_BYTES >> 20} MiB"
            raise Refused(
                f"{needed}, and {free >> 20} MiB are free in {work.root}",
                "free space there, or set `workdir:`",
            )
        ready.root.mkdir(parents=True)
        write_json(ready.node, {"schema": 1, **{key: request[key] for key in ("job", "owner", "cluster")}})
        old = WorkFolder(source["workdir"]).job(source["job"])
        for name, *before in request["files"]:
            copy_file(old, name, before, ready, progress)
    return {"folder": str(ready.root)}


def copy_file(old: JobFolder, name: str, before: Sequence[int], ready: JobFolder, progress: ProgressStream) -> None:
    """before: the file's mark when it was listed. Raises Refused if the file changed since or during the copy."""
    with folder(old.root) as root, holder(root, name) as (at, last), _opened(os.open(last, READ, dir_fd=at)) as source:
        found = os.fstat(source)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise Refused(f"{old.root}/{name} is no plain file of this user", "remove it there, and run again")
        with folder(ready.root) as top, holder(top, name, make=True) as (into, to):
            with _opened(os.open(_HALF, _WRITE, 0o600, dir_fd=into)) as target:
                was = _copied(source, target, found.st_size, progress)
                same = was == _digest(target, found.st_size, progress)
                if not same or mark(found) != list(before) or mark(os.fstat(source)) != list(before):
                    raise Refused(f"{old.root}/{name} changes while it is copied", "run again when the file is at rest")
                os.utime(target, ns=(found.st_mtime_ns, found.st_mtime_ns))
                os.fsync(target)
            os.rename(_HALF, to, src_dir_fd=into, dst_dir_fd=into)


@contextlib.contextmanager
def _opened(handle: int) -> Any:
    try:
        yield handle
    finally:
        os.close(handle)


def _copied(source: int, target: int, size: int, progress: ProgressStream) -> str:
    def write(end: int, piece: bytes) -> None:
        left = memoryview(piece)
        while left:
            left = left[os.pwrite(target, left, end - len(left)) :]
        progress.mention({"copied": end})

    return hash_pieces(source, size, write)[1]


def _digest(handle: int, size: int, progress: ProgressStream) -> str:
    return hash_pieces(handle, size, lambda end, _: progress.mention({"looked": end}))[1]
