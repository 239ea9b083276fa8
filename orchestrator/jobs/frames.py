"""What a host sends of a job's files, each frame as a checked value. Pure.

    frame, due = parse_frame("v100", line, partial(rank_of_log, ranks=frozenset({0, 1})))

A host is not trusted to name files: only the names that this job's logs can have are let through (or those that were
asked for: `remote/sender.py`), and pieces have a largest size. Anything else is a ProbeError.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import HostError, ProbeError
from orchestrator.jobs.metric_lines import duration
from orchestrator.text import message, one_line

MAX_PIECE_BYTES = 1 << 18
MAX_HOLE_BYTES = 1 << 44
LARGEST_WALL = 2.5e11
"""In the year 9892: later ones are no date here."""
HEAD_BYTES = 1 << 12
"""A file is known by its inode and by how it begins."""
LOGS = ("stdout.log", "stderr.log")
RANK_FILES = (*LOGS, "metrics.jsonl")
NODE_FILES = ("supervisor.log", "torchrun.log", "prepare.log", "gpu.jsonl")
_RANK_FILE = re.compile(rf"rank-(\d{{1,5}})/({'|'.join(map(re.escape, RANK_FILES))})")


@dataclass(frozen=True)
class FilePiece:
    """New bytes of one file."""

    file: str
    rank: int | None
    """None for a file of the node itself."""
    offset: int
    data: bytes
    inode: int | None = None
    """The file's on its host."""
    restarted: bool = False
    """Whether the file was cut, replaced or rotated on its host: what came before belongs to an older generation."""
    hole: int = 0
    """So many zero bytes follow `data`; they take no room on the host's disk."""
    wall: float | None = None
    """When these bytes were printed, in seconds since 1970 by the host's clock; None where that was not asked for, or
    is not known."""

    @property
    def end(self) -> int:
        """Where the next piece goes on."""
        return self.offset + len(self.data) + self.hole


@dataclass(frozen=True)
class Held:
    """What is here of a file: its first `offset` bytes, of which `head` are the first HEAD_BYTES."""

    offset: int = 0
    inode: int | None = None
    """The file's on its host; None where that is not known."""
    head: bytes = b""

    def request(self) -> dict[str, Any]:
        """What `remote/reader.py` has to know to go on from here."""
        return {"offset": self.offset, "inode": self.inode, "head": hashlib.sha256(self.head).hexdigest()}

    def plus(self, piece: FilePiece) -> Held:
        """With this piece, which goes on where this ends."""
        room = HEAD_BYTES - len(self.head)
        head = self.head + (bytes(min(room, piece.hole)) if piece.hole else piece.data[:room])
        return Held(piece.end, piece.inode, head)


@dataclass(frozen=True)
class Agent:
    """The supervisor's record, as it is now."""

    record: dict[str, Any]


@dataclass(frozen=True)
class End:
    """The last frame: what the host says that the controller now has."""

    files: dict[str, tuple[int, str]]
    """Each file's size in bytes and its `files.Digest`."""
    left: dict[str, int] = field(default_factory=dict)
    """The bytes that were not to be handed out, of files with more than that."""


@dataclass(frozen=True)
class Whole:
    """All bytes of this file have come."""

    file: str
    size: int
    mtime_ns: int
    sha256: str
    """The host's digest of all bytes: see `files.Digest`."""


@dataclass(frozen=True)
class Left:
    """This file does not come, and why."""

    file: str
    why: str


@dataclass(frozen=True)
class Beat:
    """Nothing new."""

    from_host: bool = False
    """Whether the host's program says so; else only our own clock does."""


Frame = FilePiece | Agent | Whole | Left | End | Beat


def names_of(ranks: Iterable[int]) -> list[str]:
    """Every file that a host with these ranks may have of a job."""
    return [f"rank-{rank}/{name}" for rank in ranks for name in RANK_FILES] + list(NODE_FILES)


def asked_for(name: str, asked: frozenset[str]) -> None:
    """Raises ValueError for any name that nobody asked for."""
    if name not in asked:
        raise ValueError(f"file name {name!r}")


def rank_of_log(name: str, ranks: frozenset[int]) -> int | None:
    """Raises ValueError for any name but this job's own."""
    match = _RANK_FILE.fullmatch(name)
    if match and int(match[1]) in ranks and name == f"rank-{int(match[1])}/{match[2]}":
        return int(match[1])
    if name in NODE_FILES:
        return None
    raise ValueError(f"file name {name!r}")


def parse_frame(node: str, line: bytes, rank_of: Callable[[str], int | None]) -> tuple[Frame, int]:
    """A frame, and how many bytes of a piece follow it. rank_of: `asked_for`, or `rank_of_log`.

    Raises ProbeError for what is no frame, HostError for what went wrong on the host by its own words.
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
    size, offset, inode, hole = header["size"], header["offset"], header["inode"], header.get("hole", 0)
    if not isinstance(hole, int) or not 0 <= hole <= MAX_HOLE_BYTES:
        raise ValueError(f"a hole of {hole!r} bytes")
    if not isinstance(size, int) or not (size == 0 if hole else 0 < size <= MAX_PIECE_BYTES):
        raise ValueError(f"a piece of {size!r} bytes")
    if not isinstance(offset, int) or offset < 0:
        raise ValueError(f"offset {offset!r}")
    if inode is not None and not isinstance(inode, int):
        raise ValueError(f"inode {inode!r}")
    wall = duration(header, "wall", LARGEST_WALL)
    return FilePiece(header["file"], rank_of(header["file"]), offset, b"", inode, hole=hole, wall=wall), size


def _whole(header: dict[str, Any]) -> Whole:
    whole = Whole(header["whole"], int(header["size"]), int(header["mtime_ns"]), str(header["sha256"]))
    if not 0 <= whole.mtime_ns < 1 << 63:
        raise ValueError(f"a time of {whole.mtime_ns} ns")
    return whole
