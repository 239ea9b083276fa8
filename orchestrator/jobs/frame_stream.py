"""Reads the stream of `remote/reader.py` or `remote/sender.py`: bytes from a host in, checked values out. Pure.

    held = {}
    for frame in read_frames("v100", chunks, frozenset({0, 1}), held):  # updates `held`
        ...

A piece has to begin where the piece before it ended (or at the beginning of its file), and a line has a largest size.
Anything else ends the stream with a ProbeError, as does an invalid frame (`frames`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import replace
from functools import partial

from orchestrator.errors import ConnectError, ProbeError
from orchestrator.jobs.frames import Beat, FilePiece, Frame, Held, asked_for, parse_frame, rank_of_log
from orchestrator.transport.noise import MAX_NOISE_BYTES, endless

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
    """The logs of a job with these ranks on this node.

    chunks: as a transport's stream yields them (b"" gives a Beat). marker: begins each frame; bytes between two frames
    are skipped. held: by file, the part that is here; updated before each piece is yielded. A piece is yielded part by
    part as its bytes come, so that a broken connection loses none of them. limit_bytes: requested of each file.
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
    """The files that were requested (`asked`). For the other arguments see `read_frames`."""
    return _Frames(node, partial(asked_for, asked=asked), {} if held is None else held, marker, None).read(chunks)


class _Frames:
    """Frames from bytes, however these are cut."""

    def __init__(
        self,
        node: str,
        rank_of: Callable[[str], int | None],
        held: MutableMapping[str, Held],
        marker: bytes,
        limit_bytes: int | None,
    ) -> None:
        """rank_of: raises ValueError for a file that was not requested."""
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
        """The bytes of it that have come."""
        part = replace(coming, data=bytes(self._buffer[: self._due]))
        del self._buffer[: len(part.data)]
        self._coming, self._due = replace(coming, offset=part.end), self._due - len(part.data)
        return _follow_on(self._node, part, self._held)

    def _header(self) -> tuple[Frame, int] | None:
        """The next frame, and the number of bytes that follow it; None until its line is complete."""
        self._skipped += _skip_noise(self._buffer, self._marker)
        if self._skipped > MAX_NOISE_BYTES:
            raise endless(self._node, self._buffer)
        line = _take_line(self._node, self._buffer, self._marker)
        if line is None:
            return None
        self._skipped = 0
        return parse_frame(self._node, line, self._rank_of)

    def _begun(self, frame: Frame, due: int) -> Iterator[Frame]:
        """The frame, unless it is a piece, whose bytes are still to come."""
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
    """Removes the bytes before the next marker, except the beginning of a marker. Returns their number."""
    at = buffer.find(marker)
    size = at if at >= 0 else max(0, len(buffer) - len(marker) + 1)
    del buffer[:size]
    return size


def _take_line(node: str, buffer: bytearray, marker: bytes) -> bytes | None:
    """Removes one complete line and its marker from the front of the buffer. None until the line is complete."""
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
