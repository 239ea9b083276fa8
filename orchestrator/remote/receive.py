"""Receives a data set: reports missing files, receives them, and makes each visible only when complete.

Request: {"folder", "files": [[name, size, sha256], ...]}, names relative to the folder. Output (see `progress_stream`):

    {"waits": 1}                       another push is at work in this folder
    {"looked": bytes}                  bytes of existing files hashed so far
    {"lacks": [[index, offset], ...]}  files to send, each from this offset on; in parts
    {"go": 1}                          the list is complete and there is room; now the bytes come, in this order
    {"end": {"folder", "received"}}    every file is here; `received` files came

A file arrives as `.orch-<hash of name and content>.part` next to its place, where the next push continues after a
broken connection; the hash of the whole file is checked at the end. No link below the folder is followed, and nothing
is written where another user controls the path.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import select
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .answer import Refused
from .datasets import write_mark
from .progress_stream import STDIN, ControllerLeft, ProgressStream, alone_at, serve
from .safe_open import READ, UnsafeError, chosen_folder, holder, is_trusted

CHUNK_BYTES = 1 << 20
SPARE_BYTES = 64 << 20  # left free on the disk
SILENT_S = 60.0  # after this long without a byte, the controller counts as gone
SETTLE_FILES, SETTLE_BYTES = 64, 64 << 20
"""Files are synced in groups: one file-system commit then serves many small ones."""
NICE = 10
LOCK = ".lock"  # the trainer holds it too while it unpacks
PARTIAL = ".orch-"


def main(request: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    serve(request, receive)


@dataclass
class Incoming:
    name: str
    size: int
    digest: str
    at: int = 0  # bytes in its partial file, which `sha256` includes
    sha256: Any = field(default_factory=hashlib.sha256)

    @property
    def partial(self) -> str:
        mark = hashlib.sha256(f"{self.name}:{self.digest}".encode(errors="surrogateescape")).hexdigest()[:32]
        above, slash, _ = self.name.rpartition("/")
        return f"{above}{slash}{PARTIAL}{mark}.part"


def receive(request: dict[str, Any], progress: ProgressStream) -> dict[str, Any]:
    folder = Path(request["folder"]).expanduser().absolute()
    files = [Incoming(checked(name), size, digest) for name, size, digest in request["files"]]
    try:
        with chosen_folder(folder) as top, alone_at(LOCK, progress, dir_fd=top):
            lacking = {index: file for index, file in compare(top, files, progress)}
            refuse_if_full(folder, top, sum(file.size - file.at for file in lacking.values()))
            rows = [[index, file.at] for index, file in lacking.items()]
            for start in range(0, len(rows), 1000):
                progress.send({"lacks": rows[start : start + 1000]})
            progress.send({"go": 1})
            settle_all(top, (take(top, file) for file in lacking.values()))
            remove_partials(top, {file.name.rpartition("/")[0] for file in lacking.values()})
            write_mark(top, {file.name: file.size for file in files})
    except UnsafeError as error:
        raise Refused(
            f"{folder / error.filename} {error.strerror}",
            "choose a folder in which only you may write (`chmod o-w`, or `--to /path`)",
        ) from error
    return {"folder": str(folder), "received": len(lacking)}


def checked(name: str) -> str:
    """A relative name that stays in its folder and is not a partial file's. Raises ValueError."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") or part.startswith(PARTIAL) for part in parts):
        raise ValueError(f"file name {name!r}")
    return name


# ---- existing files -------------------------------------------------------------------------------------------


def compare(top: int, files: Iterable[Incoming], progress: ProgressStream) -> Iterator[tuple[int, Incoming]]:
    """(place in the request, file) of each missing file, with the bytes that came before."""
    looked = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for index, file in enumerate(files):
        with opened(top, file.name) as content:
            if content and os.fstat(content.fileno()).st_size == file.size:
                present = hashlib.sha256()
                while count := content.readinto(buffer):
                    present.update(buffer[:count])
                    looked += count
                    progress.mention({"looked": looked})
                if present.hexdigest() == file.digest:
                    continue
        with opened(top, file.partial) as content:
            if content and os.fstat(content.fileno()).st_size <= file.size:
                while count := content.readinto(buffer):
                    file.sha256.update(buffer[:count])
                    file.at += count
                    progress.mention({"beat": 1})
        yield index, file


@contextlib.contextmanager
def opened(top: int, name: str) -> Iterator[io.FileIO | None]:
    """None if there is no such file. Raises Refused, UnsafeError if it is not a plain file of ours."""
    with contextlib.ExitStack() as stack:
        try:
            at, last = stack.enter_context(holder(top, name))
            handle = os.open(last, READ, dir_fd=at)
        except (FileNotFoundError, NotADirectoryError):
            yield None
            return
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UnsafeError(name, "is a link, and links are not followed there") from error
        stack.callback(os.close, handle)
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise Refused(
                f"{name} is no plain file there", "move it out of the way, or push to another folder (`--to`)"
            )
        if not is_trusted(found.st_uid):
            raise UnsafeError(name, "belongs to another user")
        yield stack.enter_context(open(handle, "rb", buffering=0, closefd=False))


def refuse_if_full(folder: Path, top: int, needed: int) -> None:
    free = shutil.disk_usage(top).free
    if needed and needed + SPARE_BYTES > free:
        raise Refused(
            f"{folder} needs {_mebibytes(needed + SPARE_BYTES)} more, and {_mebibytes(free)} are free there",
            "free space on that host, or push to a folder on a larger disk: `--to /path`",
        )


def _mebibytes(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


# ---- incoming files -------------------------------------------------------------------------------------------


def take(top: int, file: Incoming) -> tuple[Incoming, int]:
    """Receives the rest of one file into its partial file; returns the open handle."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with holder(top, file.partial, make=True) as (at, last):
        handle = os.open(last, flags, 0o600, dir_fd=at)
    try:
        found = os.fstat(handle)
        if found.st_uid != os.getuid() or found.st_nlink != 1:
            raise UnsafeError(file.partial, "belongs to another user")
        os.ftruncate(handle, file.at)
        os.lseek(handle, file.at, os.SEEK_SET)
        for piece in _bytes_from_controller(file.size - file.at):
            file.sha256.update(piece)
            _write_all(handle, piece)
        if file.sha256.hexdigest() != file.digest:
            with holder(top, file.partial) as (at, last):
                os.unlink(last, dir_fd=at)
            raise Refused(f"{file.name} arrived damaged, or changed while it was sent", "push again")
    except BaseException:
        os.close(handle)
        raise
    return file, handle


def _bytes_from_controller(count: int) -> Iterator[memoryview]:
    # Reads standard input unbuffered: these bytes are sent after our `go`.
    buffer = memoryview(bytearray(min(count, CHUNK_BYTES)))
    while count:
        ready, _, _ = select.select([STDIN], [], [], SILENT_S)
        got = os.readv(STDIN, [buffer[: min(count, CHUNK_BYTES)]]) if ready else 0
        if not got:
            raise ControllerLeft
        yield buffer[:got]
        count -= got


def _write_all(handle: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(handle, piece) :]


def settle_all(top: int, taken: Iterable[tuple[Incoming, int]]) -> None:
    # Syncs files in groups, then renames them: a file with its final name survives a power cut.
    group: list[tuple[Incoming, int]] = []
    try:
        for file, handle in taken:
            group.append((file, handle))
            if len(group) >= SETTLE_FILES or sum(file.size for file, _ in group) >= SETTLE_BYTES:
                _settle(top, group)
    finally:
        _settle(top, group)


def _settle(top: int, group: list[tuple[Incoming, int]]) -> None:
    for _, handle in group:
        os.fsync(handle)
    for file, handle in group:
        os.close(handle)
        with holder(top, file.name) as (at, last):
            os.rename(file.partial.rpartition("/")[2], last, src_dir_fd=at, dst_dir_fd=at)
    for above in {file.name.rpartition("/")[0] for file, _ in group}:
        with holder(top, f"{above}/" if above else "") as (at, _):
            os.fsync(at)
    group.clear()


def remove_partials(top: int, folders: Iterable[str]) -> None:
    for above in folders:
        with holder(top, f"{above}/" if above else "") as (at, _):
            for name in os.listdir(at):
                if name.startswith(PARTIAL) and name.endswith(".part"):
                    os.unlink(name, dir_fd=at)
