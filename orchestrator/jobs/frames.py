"""The frames in which a host sends a job's files, parsed into checked values. Pure.

    frame, due = parse_frame("v100", line, partial(rank_of_log, ranks=frozenset({0, 1})))

The host is not trusted: unexpected file names and sizes raise ProbeError.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from orchestrator.errors import ConnectError, HostError, ProbeError
from orchestrator.jobs.metric_lines import duration
from orchestrator.transport.ask import MAX_NOISE_BYTES, endless
from orchestrator.units import message, one_line

MAX_PIECE_BYTES = 1 << 18
LARGEST_WALL = 2.5e11
"""In the year 9892."""
HEAD_BYTES = 1 << 12
"""A file is recognised by its inode and its first HEAD_BYTES."""
LOGS = ("stdout.log", "stderr.log")
RANK_FILES = (*LOGS, "metrics.jsonl")
NODE_FILES = ("supervisor.log", "torchrun.log", "prepare.log", "gpu.jsonl")
_RANK_FILE = re.compile(rf"rank-(\d{{1,5}})/({'|'.join(map(re.escape, RANK_FILES))})")


@dataclass(frozen=True)
class FilePiece:
    """rank: None for a file of the node. restarted: the file was cut, replaced or rotated, and comes again from its
    beginning. wall: when the bytes were printed, in seconds since 1970 by the host's clock; None if unknown.
    """

    file: str
    rank: int | None
    offset: int
    data: bytes
    inode: int | None = None
    restarted: bool = False
    wall: float | None = None

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(frozen=True)
class Held:
    """The part of a file that is here. head: its first HEAD_BYTES."""

    offset: int = 0
    inode: int | None = None
    head: bytes = b""

    def request(self) -> dict[str, Any]:
        """For `remote/reader.py`."""
        return {"offset": self.offset, "inode": self.inode, "head": hashlib.sha256(self.head).hexdigest()}

    def plus(self, piece: FilePiece) -> Held:
        return Held(piece.end, piece.inode, self.head + piece.data[: HEAD_BYTES - len(self.head)])


@dataclass(frozen=True)
class Agent:
    record: dict[str, Any]


@dataclass(frozen=True)
class End:
    """files: size and SHA-256 of the bytes sent. left: by file, bytes beyond the limit."""

    files: dict[str, tuple[int, str]]
    left: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Whole:
    """A file has come completely."""

    file: str
    size: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class Left:
    """The host does not send this file."""

    file: str
    why: str


@dataclass(frozen=True)
class Beat:
    """Nothing new. from_host: not from the local clock."""

    from_host: bool = False


Frame = FilePiece | Agent | Whole | Left | End | Beat


def names_of(ranks: Iterable[int]) -> list[str]:
    return [f"rank-{rank}/{name}" for rank in ranks for name in RANK_FILES] + list(NODE_FILES)


def asked_for(name: str, asked: frozenset[str]) -> None:
    if name not in asked:
        raise ValueError(f"file name {name!r}")


def rank_of_log(name: str, ranks: frozenset[int]) -> int | None:
    """None for a node's file. Raises ValueError."""
    match = _RANK_FILE.fullmatch(name)
    if match and int(match[1]) in ranks and name == f"rank-{int(match[1])}/{match[2]}":
        return int(match[1])
    if name in NODE_FILES:
        return None
    raise ValueError(f"file name {name!r}")


def parse_frame(node: str, line: bytes, rank_of: Callable[[str], int | None]) -> tuple[Frame, int]:
    """Returns also the number of bytes that follow the frame. rank_of: `asked_for` or `rank_of_log`. Raises ProbeError
    for an invalid frame, HostError for an error that the host reports.
    """
    try:
        header = json.loads(line)
        if "file" in header:
            return _piece(header, rank_of)
        if "agent" in header:
            return Agent(dict(header["agent"])), 0
        if "error" in header:
            raise HostError(node, message(header["error"]), one_line(header.get("remedy", "")))
        if "end" in header:
            files = {str(name): (int(f["size"]), str(f["sha256"])) for name, f in header["end"].items()}
            for name in files:
                rank_of(name)
            left = {str(name): int(f.get("left", 0)) for name, f in header["end"].items()}
            return End(files, {name: size for name, size in left.items() if size > 0}), 0
        if "whole" in header:
            rank_of(header["whole"])
            return _whole(header), 0
        if "left" in header:
            rank_of(header["left"])
            return Left(header["left"], one_line(header["why"])), 0
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ProbeError(node, f"sent an invalid frame ({error.__class__.__name__}: {str(error)[:80]})") from error
    return Beat(from_host=True), 0


def _piece(header: dict[str, Any], rank_of: Callable[[str], int | None]) -> tuple[FilePiece, int]:
    size, offset, inode = header["size"], header["offset"], header["inode"]
    if not isinstance(size, int) or not 0 < size <= MAX_PIECE_BYTES:
        raise ValueError(f"a piece of {size!r} bytes")
    if not isinstance(offset, int) or offset < 0:
        raise ValueError(f"offset {offset!r}")
    if inode is not None and not isinstance(inode, int):
        raise ValueError(f"inode {inode!r}")
    wall = duration(header, "wall", LARGEST_WALL)
    return FilePiece(header["file"], rank_of(header["file"]), offset, b"", inode, wall=wall), size


def _whole(header: dict[str, Any]) -> Whole:
    whole = Whole(header["whole"], int(header["size"]), int(header["mtime_ns"]), str(header["sha256"]))
    if not 0 <= whole.mtime_ns < 1 << 63:
        raise ValueError(f"a time of {whole.mtime_ns} ns")
    return whole


# Streams of `remote/reader.py` and `remote/sender.py`, parsed. Pure. A piece has to begin where the previous one of its
# file ended, or at the beginning, and a line has a largest size; anything else is a ProbeError.

MAX_LINE_BYTES = 1 << 20


def read_frames(
    node: str,
    chunks: Iterable[bytes],
    ranks: frozenset[int],
    held: MutableMapping[str, Held] | None = None,
    *,
    marker: bytes = b"",
    limit_bytes: int | None = None,
) -> Iterator[Frame]:
    """The frames of a job's logs. chunks: b"" gives a Beat. marker: begins each frame; bytes between frames are
    skipped. held: by file; updated before each piece is yielded. A piece is yielded in parts as its bytes come, so that
    a broken connection loses none. limit_bytes: per file.
    """
    frames = _Frames(node, partial(rank_of_log, ranks=ranks), {} if held is None else held, marker, limit_bytes)
    return frames.read(chunks)


def read_files(
    node: str,
    chunks: Iterable[bytes],
    asked: frozenset[str],
    held: MutableMapping[str, Held] | None = None,
    *,
    marker: bytes = b"",
) -> Iterator[Frame]:
    """asked: the names requested. See `read_frames`."""
    return _Frames(node, partial(asked_for, asked=asked), {} if held is None else held, marker, None).read(chunks)


class _Frames:
    def __init__(
        self,
        node: str,
        rank_of: Callable[[str], int | None],
        held: MutableMapping[str, Held],
        marker: bytes,
        limit_bytes: int | None,
    ) -> None:
        self._node, self._rank_of, self._held = node, rank_of, held
        self._marker, self._limit_bytes = marker, limit_bytes
        self._buffer = bytearray()
        self._skipped = 0
        self._coming: FilePiece | None = None
        self._due = 0  # bytes of the piece `_coming` that have not come yet

    def read(self, chunks: Iterable[bytes]) -> Iterator[Frame]:
        for chunk in chunks:
            self._buffer += chunk
            if not chunk:
                yield Beat()
            while self._buffer:
                if self._coming and self._due:
                    yield self._part_of(self._coming)
                elif header := self._header():
                    yield from self._begun(*header)
                else:
                    break
        if self._buffer or self._due:
            raise ConnectError(self._node, "its answer broke off in the middle of a frame")

    def _part_of(self, coming: FilePiece) -> FilePiece:
        part = replace(coming, data=bytes(self._buffer[: self._due]))
        del self._buffer[: len(part.data)]
        self._coming, self._due = replace(coming, offset=part.end), self._due - len(part.data)
        return _follow_on(self._node, part, self._held)

    def _header(self) -> tuple[Frame, int] | None:
        """Returns also the number of bytes that follow; None until the line is complete."""
        self._skipped += _skip_noise(self._buffer, self._marker)
        if self._skipped > MAX_NOISE_BYTES:
            raise endless(self._node, self._buffer)
        line = _take_line(self._node, self._buffer, self._marker)
        if line is None:
            return None
        self._skipped = 0
        return parse_frame(self._node, line, self._rank_of)

    def _begun(self, frame: Frame, due: int) -> Iterator[Frame]:
        self._due = due
        if not isinstance(frame, FilePiece):
            yield frame
            return
        if self._limit_bytes is not None and frame.end + due > self._limit_bytes:
            raise ProbeError(self._node, f"sent more of {frame.file} than its first {self._limit_bytes} bytes")
        self._coming = frame


def _follow_on(node: str, piece: FilePiece, held: MutableMapping[str, Held]) -> FilePiece:
    before = held.get(piece.file, Held())
    if piece.offset == 0 and before.offset:
        before, piece = Held(), replace(piece, restarted=True)
    if piece.offset != before.offset:
        raise ProbeError(node, f"sent {piece.file} from byte {piece.offset} on, where {before.offset} was due")
    held[piece.file] = before.plus(piece)
    return piece


def _skip_noise(buffer: bytearray, marker: bytes) -> int:
    """Keeps the beginning of a marker. Returns the number of bytes removed."""
    at = buffer.find(marker)
    size = at if at >= 0 else max(0, len(buffer) - len(marker) + 1)
    del buffer[:size]
    return size


def _take_line(node: str, buffer: bytearray, marker: bytes) -> bytes | None:
    """Without the marker; None until the line is complete."""
    if not buffer.startswith(marker):
        return None
    end = buffer.find(b"\n", 0, MAX_LINE_BYTES)
    if end < 0:
        if len(buffer) >= MAX_LINE_BYTES:
            raise ProbeError(node, "sent a line longer than any frame's")
        return None
    line = bytes(buffer[len(marker) : end])
    del buffer[: end + 1]
    return line
