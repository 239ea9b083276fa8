"""Copies a data set to many hosts at once; each host gets only missing bytes and verifies files by SHA-256.

The other end is `remote/receive.py`: it receives the manifest, requests what it lacks, then receives the bytes. Partial
files stay, so that an interrupted push resumes.
"""

from __future__ import annotations

import errno
import hashlib
import queue
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import HostError, ProbeError, UsageError
from orchestrator.planning.variables import LOGINS, is_secret, refuse_home
from orchestrator.transport.ask import ConnectedHost, ask, exchange, understood
from orchestrator.transport.fanout import on_each_link
from orchestrator.units import one_line

PIECE_BYTES = 1 << 18

Phase = Literal["connects", "waits", "looks", "sends", "done"]


@dataclass(frozen=True)
class PushProgress:
    node: str
    phase: Phase
    here_bytes: int = 0
    """Bytes of the data set on the host."""
    looked_bytes: int = 0
    """Existing bytes that the host has read."""


@dataclass(frozen=True)
class Pushed:
    """The result on one host. files, bytes: sent in this push."""

    folder: str
    files: int
    bytes: int


SETS_S = 120.0


@dataclass(frozen=True)
class DataSet:
    """On a host. kept: files that were not removed, since they have changed or are not ours."""

    folder: str
    files: int
    bytes: int
    kept: int = 0


@dataclass(frozen=True)
class DataSets:
    sets: tuple[DataSet, ...]


def data_sets(host: ConnectedHost, folder: str, *, remove: bool) -> DataSets:
    """Raises HostError."""
    answer = ask(host, "datasets", {"action": "remove" if remove else "list", "folders": [folder]}, timeout_s=SETS_S)
    return understood(host.node, lambda: DataSets(tuple(_data_set(**found) for found in answer["sets"])))


def _data_set(folder: str, files: int, bytes: int, kept: int) -> DataSet:
    return DataSet(one_line(folder), max(0, int(files)), max(0, int(bytes)), max(0, int(kept)))


def push(
    hosts: Mapping[str, ConnectedHost],
    manifest: Manifest,
    folder: str,
    show: Callable[[PushProgress], None],
    reopen: Callable[[str], ConnectedHost],
) -> dict[str, Pushed | HostError]:
    """show: called from several threads. reopen: a new connection after a break.

    Raises UsageError if a local file became unreadable.
    """
    return on_each_link({name: _Session(host, manifest, folder, show) for name, host in hosts.items()}, reopen)


class _Session:
    """A push to one host, over one or more connections."""

    def __init__(
        self, host: ConnectedHost, manifest: Manifest, folder: str, show: Callable[[PushProgress], None]
    ) -> None:
        self.host, self.moved_bytes = host, 0
        self._manifest, self._folder, self._show = manifest, folder, show
        self._lacking: list[tuple[int, int]] = []
        self._files: set[int] = set()
        self._go = queue.SimpleQueue[bool]()
        self._problem: OSError | None = None
        self._progress = PushProgress(host.node, "connects")
        self._before_bytes = 0  # on the host before this push
        self._due_bytes = 0  # moved bytes at the end of this push

    def run(self) -> Pushed:
        self._lacking, self._go, self._problem = [], queue.SimpleQueue(), None
        request = {"folder": self._folder, "files": [(f.name, f.size, f.sha256) for f in self._manifest.files]}
        self._progress = PushProgress(self.host.node, "connects")
        with exchange(self.host, "receive", request, self._pieces(self._go)) as messages:
            try:
                for message in messages:
                    if self._problem:
                        where = self._problem.filename or self._manifest.root
                        raise UsageError(f"{where}: {self._problem.strerror}", "push again")
                    if "end" in message:
                        return self._pushed(message["end"])
                    self._progress = understood(self.host.node, partial(self._progress_after, message))
                    self._show(self._progress)
            finally:
                self._go.put(False)
        raise ProbeError(self.host.node, "its answer was cut short", "try again")

    def _progress_after(self, message: Mapping[str, Any]) -> PushProgress:
        """Raises ValueError, TypeError for a malformed message."""
        if "waits" in message:
            return replace(self._progress, phase="waits")
        if "looked" in message:
            return replace(self._progress, phase="looks", looked_bytes=int(message["looked"]))
        for index, offset in message.get("lacks", ()):
            self._note_lacking(index, offset)
        if "go" in message and self._progress.phase != "sends":
            self._files |= {index for index, _ in self._lacking}
            lacking = sum(self._manifest.files[index].size - offset for index, offset in self._lacking)
            self._before_bytes = self._manifest.size_bytes - lacking - self.moved_bytes
            self._due_bytes = self.moved_bytes + lacking
            self._go.put(True)
        elif self._progress.phase != "sends":
            return self._progress
        return replace(self._progress, phase="sends", here_bytes=self._before_bytes + self.moved_bytes)

    def _note_lacking(self, index: Any, offset: Any) -> None:
        if not isinstance(index, int) or not 0 <= index < len(self._manifest.files):
            raise ValueError("a file that was not announced to it")
        if not isinstance(offset, int) or not 0 <= offset <= self._manifest.files[index].size:
            raise ValueError("an offset outside of its file")
        if self._lacking and index <= self._lacking[-1][0]:
            raise ValueError("files out of order")
        self._lacking.append((index, offset))

    def _pieces(self, go: queue.SimpleQueue[bool]) -> Iterator[bytes]:
        """The missing bytes, once the host is ready. Runs in the transport's thread."""
        if not go.get():
            return
        try:
            for index, offset in self._lacking:
                file = self._manifest.files[index]
                left = file.size - offset
                for piece in read_pieces(self._manifest.root / file.name, offset, PIECE_BYTES):
                    yield piece[:left]
                    self.moved_bytes += min(left, len(piece))
                    left -= len(piece)
                    if left <= 0:
                        break
                if left > 0:
                    raise OSError(0, "became shorter while it was sent", str(self._manifest.root / file.name))
        except OSError as error:
            self._problem = error

    def _pushed(self, end: Mapping[str, Any]) -> Pushed:
        self._show(PushProgress(self.host.node, "done", here_bytes=self._manifest.size_bytes))
        folder = understood(self.host.node, lambda: one_line(end["folder"], 4096))
        return Pushed(
            folder, len(self._files), self._due_bytes
        )  # the transport may not have counted the last piece yet


# Manifest of a local data set: names, sizes and SHA-256 of its files. Links are followed within the folder and refused
# if they lead outside, as are special files, home folders, and files that look like a login or a private key.

CHUNK_BYTES = 1 << 20
OURS = ".orch-"
"""Prefix of a push's partial files on a host."""


@dataclass(frozen=True)
class ManifestFile:
    """name: relative, with `/`. sha256: in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    root: Path
    files: tuple[ManifestFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


def read_manifest(root: Path, progress: Callable[[int, int], None] = lambda *_: None) -> Manifest:
    """progress: called with bytes hashed and in total. Raises UsageError for anything that must not be sent."""
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder here", "name the folder that holds the data set")
    refuse_home(root, "name the folder that holds the data set, and nothing else")
    names = list(_walk(root, root, (root.resolve(),)))
    if not names:
        raise UsageError(f"{root} holds no files", "name the folder that holds the data set")
    if secret := [name for name in names if is_secret(root, name, LOGINS)]:
        more = f" and {len(secret) - 1} more" if len(secret) > 1 else ""
        raise UsageError(f"{root / secret[0]}{more}: looks like a secret, not like data", "move it out of the data set")
    total, done = sum((root / name).stat().st_size for name in names), 0
    files = []
    for name in names:
        sha256, size = hashlib.sha256(), 0
        for piece in read_pieces(root / name):
            sha256.update(piece)
            size, done = size + len(piece), done + len(piece)
            progress(done, total)
        files.append(ManifestFile(name, size, sha256.hexdigest()))
    return Manifest(root, tuple(files))


def read_pieces(path: Path, offset: int = 0, piece_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as content:
        content.seek(offset)
        while piece := content.read(piece_bytes):
            yield piece


def _walk(root: Path, folder: Path, above: tuple[Path, ...]) -> Iterator[str]:
    """File names relative to root. above: parent folders, to detect circular links."""
    for path in sorted(folder.iterdir()):
        name = path.relative_to(root).as_posix()
        if path.name.startswith(OURS) or name == ".lock":  # left by a push to, or a training with, this folder
            continue
        real = _resolved(path)
        if not real.is_relative_to(above[0]):
            raise UsageError(f"{path} is a link out of {root}", "copy what it leads to, or remove the link")
        kind = _kind(path)
        if stat.S_ISREG(kind):
            yield name
        elif stat.S_ISDIR(kind) and real not in above:
            yield from _walk(root, path, (*above, real))
        else:
            what = "is a link to a folder above it" if stat.S_ISDIR(kind) else "is neither a file nor a folder"
            raise UsageError(f"{path} {what}", "remove it from the data set")


def _resolved(path: Path) -> Path:
    """Python versions differ in `resolve` of a circular link."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(f"{path} is a circular link", "remove it from the data set") from None
    return path.resolve()


def _kind(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        raise UsageError(f"{path} is a link to nothing", "remove it from the data set") from None
