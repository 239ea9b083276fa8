"""Bytes of a log into lines for a person: decoded, cut to a length, nothing in them that a terminal obeys. Pure.

The raw files keep every byte; this is only the view. Besides what `text.clean` takes care of, a rank may draw a line
over and over (`redraw`), print half a UTF-8 character at the end of a piece, and a line of 100 MB.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.jobs.frames import FilePiece
from orchestrator.jobs.redraw import MAX_ROW_CHARS as MAX_LINE_CHARS
from orchestrator.jobs.redraw import Drawing, Final
from orchestrator.text import clean

# What `text.clean` would change, or what is more than the end of a line: most pieces hold none of it.
_UNCLEAN = re.compile(r"[^\n\t\x20-\x7e]")


class LogLine(NamedTuple):
    """One line of one rank."""

    node: str
    rank: int
    stream: str
    """stdout or stderr."""
    text: str
    wall: float | None = None
    """When it was printed, to a second: since 1970, by its host's clock. None where nobody asked, or knows."""


@dataclass(frozen=True)
class Bars:
    """What the lines that are being drawn show now, at most one a log."""

    lines: tuple[LogLine, ...]


class Splitter:
    """Turns pieces of many files into lines, each file with its own decoder and open lines."""

    def __init__(self) -> None:
        self._decoders: dict[tuple[str, str], codecs.IncrementalDecoder] = {}
        self._drawings: dict[tuple[str, str], Drawing] = {}
        self._bars: tuple[LogLine, ...] = ()

    def split(self, node: str, piece: FilePiece) -> Iterator[LogLine]:
        """The lines that this piece completes. Pieces of anything but a rank's two logs give none."""
        stream = piece.file.rpartition("/")[2].removesuffix(".log")
        if piece.rank is None or stream not in ("stdout", "stderr"):
            return
        key = (node, piece.file)
        if piece.offset == 0 or key not in self._decoders:
            yield from self._last(key)  # of an older generation of this file
            self._decoders[key] = codecs.getincrementaldecoder("utf-8")("replace")
            self._drawings[key] = Drawing()
        text, drawing = self._decoders[key].decode(piece.data), self._drawings[key]
        unfinished = drawing.unfinished
        if unfinished is None or _UNCLEAN.search(text) or _UNCLEAN.search(unfinished):
            yield from _lines(key, drawing.take(text, piece.wall))
            return
        *whole, rest = (unfinished + text).split("\n")
        for line in whole:
            if len(line) <= MAX_LINE_CHARS:
                yield LogLine(node, piece.rank, stream, line, piece.wall)
            else:
                yield from (LogLine(node, piece.rank, stream, part, piece.wall) for part in _parts(line))
        too_long = max(0, len(rest) - 1) // MAX_LINE_CHARS * MAX_LINE_CHARS
        for part in _parts(rest[:too_long]):
            yield LogLine(node, piece.rank, stream, part, piece.wall)
        drawing.restart(rest[too_long:], piece.wall)

    def settle(self) -> Iterator[LogLine]:
        """Lines that were drawn over and are final now: to be asked for about every second."""
        for key, drawing in self._drawings.items():
            yield from _lines(key, drawing.settle())

    def bars(self) -> Bars | None:
        """None where they show what they showed when this was asked last."""
        found = tuple(
            line for key, drawing in self._drawings.items() for line in _lines(key, [Final(drawing.shown, None)])
        )
        bars = tuple(line for line in found if line.text.strip())
        if bars == self._bars:
            return None
        self._bars = bars
        return Bars(bars)

    def rest(self) -> Iterator[LogLine]:
        """What stood without a newline at the end."""
        for key in list(self._drawings):
            yield from self._last(key)

    def _last(self, key: tuple[str, str]) -> Iterator[LogLine]:
        if key in self._drawings:
            yield from (line for line in _lines(key, self._drawings.pop(key).rest()) if line.text)


def _lines(key: tuple[str, str], finals: Iterable[Final]) -> Iterator[LogLine]:
    node, file = key
    rank, _, name = file.partition("/")
    number, stream = int(rank.removeprefix("rank-")), name.removesuffix(".log")
    for text, wall in finals:
        yield LogLine(node, number, stream, clean(text), wall)


def _parts(text: str) -> list[str]:
    """In lines of at most MAX_LINE_CHARS."""
    return [text[at : at + MAX_LINE_CHARS] for at in range(0, len(text), MAX_LINE_CHARS)]
