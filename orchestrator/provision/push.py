"""Brings a data set to many hosts at once: each gets only what it lacks, verified there by SHA-256.

    outcomes = push(hosts, read_manifest(Path("data")), "~/data", show, connections.reopen)
    outcomes["v100"]           # Pushed(folder="/home/ubuntu/data", files=4, bytes=54950048), or that host's error

One channel a host (`remote/receive.py` is its other end): the manifest goes there, what is lacking comes back, then the
bytes go, as fast as the link takes them. Whatever arrived stays, however this ends; the next push goes on from there.
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
from orchestrator.planning.secret_files import LOGINS, is_secret, refuse_home
from orchestrator.text import one_line
from orchestrator.transport.ask import ConnectedHost, exchange, understood
from orchestrator.transport.fanout import on_each_link

PIECE_BYTES = 1 << 18

Phase = Literal["connects", "waits", "looks", "sends", "done"]


@dataclass(frozen=True)
class PushProgress:
    """How far the push to one host is."""

    node: str
    phase: Phase
    here_bytes: int = 0
    """So much of the data set lies on the host."""
    looked_bytes: int = 0
    """So much of what lay there before has been read."""


@dataclass(frozen=True)
class Pushed:
    """What one push did on one host."""

    folder: str
    """On the host."""
    files: int
    """How many had to be sent."""
    bytes: int
    """How many had to be sent."""


def push(
    hosts: Mapping[str, ConnectedHost],
    manifest: Manifest,
    folder: str,
    show: Callable[[PushProgress], None],
    reopen: Callable[[str], ConnectedHost],
) -> dict[str, Pushed | HostError]:
    """All hosts at once. show: called from several threads. reopen: a new connection to a host whose link broke.

    Raises UsageError where a file here can no longer be read.
    """
    return on_each_link({name: _Session(host, manifest, folder, show) for name, host in hosts.items()}, reopen)


class _Session:
    """A push to one host, over as many links as it takes."""

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
        self._before_bytes = 0
        """What lay on the host before this push."""
        self._due_bytes = 0
        """What will have been moved once all that it lacks is there."""

    def run(self) -> Pushed:
        self._lacking, self._go, self._problem = [], queue.SimpleQueue(), None
        request = {"folder": self._folder, "files": [(f.name, f.size, f.sha256) for f in self._manifest.files]}
        self._progress = PushProgress(self.host.node, "connects")
        with exchange(self.host, "receive", request, self._pieces(self._go)) as words:
            try:
                for word in words:
                    if self._problem:
                        where = self._problem.filename or self._manifest.root
                        raise UsageError(f"{where}: {self._problem.strerror}", "push again")
                    if "end" in word:
                        return self._pushed(word["end"])
                    self._progress = understood(self.host.node, partial(self._heard, word))
                    self._show(self._progress)
            finally:
                self._go.put(False)
        raise ProbeError(self.host.node, "its answer was cut short", "try again")

    def _heard(self, word: Mapping[str, Any]) -> PushProgress:
        """The progress after a host's word. Raises ValueError, TypeError where that is none."""
        if "waits" in word:
            return replace(self._progress, phase="waits")
        if "looked" in word:
            return replace(self._progress, phase="looks", looked_bytes=int(word["looked"]))
        for index, offset in word.get("lacks", ()):
            self._note_lacking(index, offset)
        if "go" in word and self._progress.phase != "sends":
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
        """The bytes of what is lacking, once the host is ready for them. Runs in the transport's thread."""
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


# A data set's folder as it is to be sent: takes a folder here, gives the names, sizes and SHA-256 of its files.
#
#     manifest = read_manifest(Path("~/data").expanduser(), progress)
#     manifest.files[0]       # ManifestFile(name="MNIST/raw/train-images-idx3-ubyte", size=47040016, sha256="ba89...")
#
# A link that stays inside the folder is sent as what it leads to; one that leads outside is refused, as is whatever is
# neither file nor folder; so are a home folder, and what looks like a login or a private key. Names are sent byte for
# byte; whoever shows one escapes it.

CHUNK_BYTES = 1 << 20
OURS = ".orch-"
"""How the names of files begin that a push has under way on a host."""


@dataclass(frozen=True)
class ManifestFile:
    """One file of a data set."""

    name: str
    """Relative, with `/`."""
    size: int
    sha256: str
    """In hex."""


@dataclass(frozen=True)
class Manifest:
    root: Path
    files: tuple[ManifestFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


def read_manifest(root: Path, progress: Callable[[int, int], None] = lambda *_: None) -> Manifest:
    """progress: bytes hashed, and of how many. Raises UsageError for what is not to be sent."""
    if not root.is_dir():
        raise UsageError(f"{root} is no folder here", "name the folder that holds the data set")
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
    """Names of all files below, relative to root. above: the folders that this one is in, for links in a circle."""
    for path in sorted(folder.iterdir()):
        name = path.relative_to(root).as_posix()
        if path.name.startswith(OURS) or name == ".lock":  # of a push or a training that had this folder, too
            continue
        real = _resolved(path)
        if not real.is_relative_to(above[0]):
            raise UsageError(f"{path} leads outside of {root}", "copy what it leads to, or remove the link")
        kind = _kind(path)
        if stat.S_ISREG(kind):
            yield name
        elif stat.S_ISDIR(kind) and real not in above:
            yield from _walk(root, path, (*above, real))
        else:
            what = "leads to a folder that it is in" if stat.S_ISDIR(kind) else "is neither a file nor a folder"
            raise UsageError(f"{path} {what}", "remove it from the data set")


def _resolved(path: Path) -> Path:
    """`resolve` alone says something else of a circle in every Python."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(f"{path} leads in a circle", "remove it from the data set") from None
    return path.resolve()


def _kind(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        raise UsageError(f"{path} is a link to nothing", "remove it from the data set") from None
