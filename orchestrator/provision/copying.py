"""Small files between this machine and many hosts at once, each whole and as its SHA-256 has it, or not at all.

found = to_hosts(connections, nodes, read_source(Path("train.toml")), "~/conf/")
found = from_hosts(connections, nodes, "/etc/hosts", lambda node: Path("hosts") / node / "hosts", umask=0o022)
found["v100"]           # Copied(path="/home/ubuntu/conf/train.toml", bytes=123, sha256="..."), or that host's error
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from orchestrator.errors import HostError, ProbeError, UsageError
from orchestrator.files import resolved, sync
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.inventory import Node
from orchestrator.text import one_line
from orchestrator.transport.ask import ConnectedHost, exchange, understood
from orchestrator.units import format_bytes

MOST_BYTES = 256 << 20
PIECE_BYTES = 1 << 18
COPY_S = 3600.0
"""At most for one copy; a host that falls silent is given up long before."""


@dataclass(frozen=True)
class Copied:
    """path: where it lies now."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """A file of this machine, as it was when it was read."""

    name: str
    mode: int
    content: bytes = field(repr=False)


def read_source(path: Path) -> Source:
    """Raises UsageError for what is no small file."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path} is no regular file", "`orch data push` brings folders")
        if found.st_size > MOST_BYTES:
            raise UsageError(f"{path} is larger than {format_bytes(MOST_BYTES)}", "`orch data push` brings large files")
        return Source(path.name, stat.S_IMODE(found.st_mode), path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a file that can be read") from error


def to_hosts(
    connections: Connections, nodes: Sequence[Node], source: Source, path: str
) -> dict[str, Copied | HostError]:
    """path: on each host, from its home folder on; a folder gets the file by its name."""
    whole = {"size": len(source.content), "sha256": hashlib.sha256(source.content).hexdigest()}
    request = {"action": "take", "path": path, "name": source.name, "mode": source.mode, **whole}
    return connections.each(nodes, partial(_put, source=source, request=request), deadline_s=COPY_S)


def from_hosts(
    connections: Connections, nodes: Sequence[Node], path: str, to: Callable[[str], Path], *, umask: int
) -> dict[str, Copied | HostError]:
    """to: where each node's file is to lie. umask: of the person, for the new files."""
    return connections.each(nodes, partial(_get, path=path, to=to, umask=umask), deadline_s=COPY_S)


def _put(host: ConnectedHost, source: Source, request: Mapping[str, Any]) -> Copied:
    view = memoryview(source.content)
    pieces = (bytes(view[start : start + PIECE_BYTES]) for start in range(0, len(view), PIECE_BYTES))
    with exchange(host, "copying", request, pieces) as words:
        for word in words:
            if "end" in word:
                return Copied(understood(host.node, partial(_path_of, word)), request["size"], request["sha256"])
    raise ProbeError(host.node, "its answer was cut short", "try again")


def _path_of(word: Mapping[str, Any]) -> str:
    return one_line(word["end"]["path"], 4096)


def _get(host: ConnectedHost, path: str, to: Callable[[str], Path], umask: int) -> Copied:
    place = resolved(to(host.node))
    with exchange(host, "copying", {"action": "give", "path": path, "most_bytes": MOST_BYTES}) as words:
        with _beside(place) as file:
            coming = _Coming(file)
            for word in words:
                understood(host.node, partial(coming.hear, word))
                if coming.is_whole:
                    os.fchmod(file.fileno(), coming.mode & 0o777 & ~umask)
                    break
            else:
                raise ProbeError(host.node, "its answer was cut short", "try again")
        return Copied(str(place), coming.size, coming.digest.hexdigest())


class _Coming:
    """A file that a host sends."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._announced = file, -1
        self.digest, self.size, self.mode, self.is_whole = hashlib.sha256(), 0, 0o600, False

    def hear(self, word: Mapping[str, Any]) -> None:
        """Raises ValueError, TypeError, KeyError for what is not the file that was announced."""
        if "size" in word:
            self._announced, self.mode = int(word["size"]), int(word["mode"])
            if self._announced > MOST_BYTES:
                raise ValueError("more bytes than were asked for")
        if "piece" in word:
            data = base64.b64decode(word["piece"], validate=True)
            self.size += len(data)
            if self.size > self._announced:
                raise ValueError("more bytes than were announced")
            self._file.write(data)
            self.digest.update(data)
        if "end" in word:
            if (self.size, self.digest.hexdigest()) != (self._announced, word["end"]["sha256"]):
                raise ValueError("the file arrived damaged")
            self.is_whole = True


@contextlib.contextmanager
def _beside(place: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes its place when it is left without an error."""
    handle, temporary = tempfile.mkstemp(prefix=".orch-", suffix=".part", dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place)
        sync(place.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
