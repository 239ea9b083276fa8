"""Takes a data set: says which files this host lacks, receives these, lets each appear whole or not at all.

Request: {"folder", "files": [[name, size, sha256], ...]}, names relative to the folder. It tells (see `talk`):

    {"waits": 1}                       another push is at work in this folder
    {"looked": bytes}                  so much of what is here already has been read and hashed
    {"lacks": [[index, offset], ...]}  files to be sent, each from this offset on; comes in parts
    {"go": 1}                          all is told and there is room; now the bytes come, in this order
    {"end": {"folder", "received"}}    every file is here; `received` counts the files that came

A file comes under another name beside its place (`.orch-<hash>.part`), where a broken link leaves what has arrived: the
next push goes on from there, and the hash over all of it decides in the end. The name tells which content it is to be.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .answer import Refused
from .talk import STDIN, Left, Talk, alone_at, tell

CHUNK_BYTES = 1 << 20
SPARE_BYTES = 64 << 20
"""Left free on the disk."""
SILENT_S = 60.0
"""Without a byte for so long, the controller is taken for gone."""
SETTLE_FILES, SETTLE_BYTES = 64, 64 << 20
"""Files are brought to the disk in groups: one commit of the file system then serves many small ones."""
NICE = 10
LOCK = ".lock"  # the same that the trainer holds while it unpacks
PARTIAL = ".orch-"


def main(request: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    tell(request, receive)


@dataclass
class Incoming:
    """One file of the request. at: so many bytes of it lie in its partial file, and `sha256` has seen them."""

    name: str
    size: int
    digest: str
    target: Path
    at: int = 0
    sha256: Any = field(default_factory=hashlib.sha256)

    @property
    def partial(self) -> Path:
        return self.target.with_name(
            f"{PARTIAL}{hashlib.sha256(f'{self.name}:{self.digest}'.encode()).hexdigest()[:32]}.part"
        )


def receive(request: dict[str, Any], talk: Talk) -> dict[str, Any]:
    folder = Path(request["folder"]).expanduser().absolute()
    files = [Incoming(name, size, digest, folder / checked(name)) for name, size, digest in request["files"]]
    folder.mkdir(parents=True, exist_ok=True)
    with alone_at(folder / LOCK, talk):
        lacking = {index: file for index, file in look(files, talk)}
        refuse_if_full(folder, sum(file.size - file.at for file in lacking.values()))
        told = [[index, file.at] for index, file in lacking.items()]
        for start in range(0, len(told), 1000):
            talk.say({"lacks": told[start : start + 1000]})
        talk.say({"go": 1})
        settle_all(take(file) for file in lacking.values())
        remove_partials({file.target.parent for file in lacking.values()})
    return {"folder": str(folder), "received": len(lacking)}


def checked(name: str) -> str:
    """A relative name that stays inside its folder and is none of ours. Raises ValueError."""
    parts = name.split("/")
    if not name.isprintable() or any(part in ("", ".", "..") or part.startswith(PARTIAL) for part in parts):
        raise ValueError(f"file name {name!r}")
    return name


# ---- what is here ---------------------------------------------------------------------------------------------


def look(files: Iterable[Incoming], talk: Talk) -> Iterator[tuple[int, Incoming]]:
    """The files that this host lacks, by their place in the request; each knows how much of it came before."""
    looked = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for index, file in enumerate(files):
        found = _size_of(file.target)
        if found == file.size:
            present = hashlib.sha256()
            with open(file.target, "rb", buffering=0) as content:
                while count := content.readinto(buffer):
                    present.update(buffer[:count])
                    looked += count
                    talk.mention({"looked": looked})
            if present.hexdigest() == file.digest:
                continue
        _look_at_partial(file, buffer, talk)
        yield index, file


def _size_of(target: Path) -> int | None:
    try:
        found = target.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        raise Refused(f"{target} is no plain file", "move it out of the way, or push to another folder (`--to`)")
    return found.st_size


def _look_at_partial(file: Incoming, buffer: memoryview, talk: Talk) -> None:
    try:
        handle = os.open(file.partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    with open(handle, "rb", buffering=0) as content:
        if os.fstat(handle).st_size > file.size:
            return
        while count := content.readinto(buffer):
            file.sha256.update(buffer[:count])
            file.at += count
            talk.mention({"beat": 1})


def refuse_if_full(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed and needed + SPARE_BYTES > free:
        raise Refused(
            f"{folder} needs {_mebibytes(needed + SPARE_BYTES)} more, and {_mebibytes(free)} are free there",
            "free space on that host, or push to a folder on a larger disk: `--to /path`",
        )


def _mebibytes(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


# ---- what comes -----------------------------------------------------------------------------------------------


def take(file: Incoming) -> tuple[Incoming, int]:
    """Receives the rest of one file into its partial file; gives that one's handle, still open."""
    file.target.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(file.partial, flags, 0o600)
    try:
        if os.fstat(handle).st_uid != os.getuid():
            raise Refused(f"{file.partial} belongs to another user", "push to a folder of your own: `--to`")
        os.ftruncate(handle, file.at)
        os.lseek(handle, file.at, os.SEEK_SET)
        for piece in _bytes_from_controller(file.size - file.at):
            file.sha256.update(piece)
            _write_all(handle, piece)
        if file.sha256.hexdigest() != file.digest:
            file.partial.unlink()
            raise Refused(f"{file.name} arrived damaged, or changed while it was sent", "push again")
    except BaseException:
        os.close(handle)
        raise
    return file, handle


def _bytes_from_controller(count: int) -> Iterator[memoryview]:
    """So many bytes of standard input. Nothing of them can be in Python's own buffer: they are sent after our `go`."""
    buffer = memoryview(bytearray(min(count, CHUNK_BYTES)))
    while count:
        ready, _, _ = select.select([STDIN], [], [], SILENT_S)
        got = os.readv(STDIN, [buffer[: min(count, CHUNK_BYTES)]]) if ready else 0
        if not got:
            raise Left
        yield buffer[:got]
        count -= got


def _write_all(handle: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(handle, piece) :]


def settle_all(taken: Iterable[tuple[Incoming, int]]) -> None:
    """Brings files to the disk, group by group, and gives them their names: what has a name survives a power cut."""
    group: list[tuple[Incoming, int]] = []
    try:
        for file, handle in taken:
            group.append((file, handle))
            if len(group) >= SETTLE_FILES or sum(file.size for file, _ in group) >= SETTLE_BYTES:
                _settle(group)
    finally:
        _settle(group)


def _settle(group: list[tuple[Incoming, int]]) -> None:
    for _, handle in group:
        os.fsync(handle)
    for file, handle in group:
        os.close(handle)
        file.partial.rename(file.target)
    for folder in {file.target.parent for file, _ in group}:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(handle)
        os.close(handle)
    group.clear()


def remove_partials(folders: Iterable[Path]) -> None:
    """Of contents that nobody asks for any more: with our lock held, nobody else is writing one."""
    for folder in folders:
        for partial in folder.glob(f"{PARTIAL}*.part"):
            partial.unlink(missing_ok=True)
