"""Reads the stream of `remote/reader.py`: bytes from a host in, checked values out. Pure.

A host is not trusted to name files: only the names that this job can have are let through, offsets have to follow one
another, and lines and pieces have a largest size. Anything else ends the stream with a ProbeError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConnectError, ProbeError

MAX_LINE_BYTES = 1 << 20
MAX_PIECE_BYTES = 1 << 18
_RANK_FILE = re.compile(r"rank-(\d{1,5})/(stdout\.log|stderr\.log|metrics\.jsonl)")
_NODE_FILES = frozenset({"supervisor.log", "torchrun.log", "prepare.log", "gpu.jsonl"})


@dataclass(frozen=True)
class Piece:
    """New bytes of one file. rank: None for a file of the node itself."""

    file: str
    rank: int | None
    offset: int
    data: bytes


@dataclass(frozen=True)
class Agent:
    """The supervisor's record, as it is now."""

    record: dict[str, Any]


@dataclass(frozen=True)
class End:
    """What the controller now has of every file, by the host: name -> (size in bytes, SHA-256)."""

    files: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class Beat:
    """Nothing new, and the link lives."""


Frame = Piece | Agent | End | Beat


def read_frames(node: str, chunks: Iterable[bytes], ranks: frozenset[int]) -> Iterator[Frame]:
    """chunks: as a transport's stream yields them (b"" gives a Beat). ranks: the ranks that live on this node."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        if not chunk:
            yield Beat()
        while (frame := _take(node, buffer, ranks)) is not None:
            yield frame
    if buffer:
        raise ConnectError(node, "its answer broke off in the middle of a frame")


def _take(node: str, buffer: bytearray, ranks: frozenset[int]) -> Frame | None:
    """Removes one whole frame from the front of the buffer; None where it is not there yet."""
    end = buffer.find(b"\n", 0, MAX_LINE_BYTES)
    if end < 0:
        if len(buffer) >= MAX_LINE_BYTES:
            raise ProbeError(node, "sent a line longer than any frame's")
        return None
    try:
        header = json.loads(bytes(buffer[:end]))
        size = _size(header)
        if len(buffer) < end + 1 + size:
            return None
        frame = _frame(header, bytes(buffer[end + 1 : end + 1 + size]), ranks)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ProbeError(node, f"sent a frame that is none ({error.__class__.__name__}: {str(error)[:80]})") from error
    del buffer[: end + 1 + size]
    return frame


def _size(header: dict[str, Any]) -> int:
    if "file" not in header:
        return 0
    size = header["size"]
    if not isinstance(size, int) or not 0 < size <= MAX_PIECE_BYTES:
        raise ValueError(f"a piece of {size!r} bytes")
    return size


def _frame(header: dict[str, Any], data: bytes, ranks: frozenset[int]) -> Frame:
    if "file" in header:
        offset = header["offset"]
        if not isinstance(offset, int) or offset < 0:
            raise ValueError(f"offset {offset!r}")
        return Piece(header["file"], _rank_of(header["file"], ranks), offset, data)
    if "agent" in header:
        return Agent(dict(header["agent"]))
    if "end" in header:
        files = {str(name): (int(f["size"]), str(f["sha256"])) for name, f in header["end"].items()}
        for name in files:
            _rank_of(name, ranks)
        return End(files)
    return Beat()


def _rank_of(name: str, ranks: frozenset[int]) -> int | None:
    """Raises ValueError for any name but this job's own."""
    match = _RANK_FILE.fullmatch(name)
    if match and int(match[1]) in ranks and name == f"rank-{int(match[1])}/{match[2]}":
        return int(match[1])
    if name in _NODE_FILES:
        return None
    raise ValueError(f"file name {name!r}")
