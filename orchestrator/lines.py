"""Bytes of a log into lines for a person: decoded, cut to a length, nothing in them that a terminal obeys. Pure.

The raw files keep every byte; this is only the view. Besides what `text.clean` takes care of, a rank may print carriage
returns that overwrite, half a UTF-8 character at the end of a piece, and a line of 100 MB.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.frames import Piece
from orchestrator.text import clean

MAX_LINE_CHARS = 1 << 16


@dataclass(frozen=True)
class Line:
    """One line of one rank. stream: "stdout" or "stderr"."""

    node: str
    rank: int
    stream: str
    text: str


class Splitter:
    """Turns pieces of many files into lines, each file with its own decoder and unfinished line."""

    def __init__(self) -> None:
        self._decoders: dict[tuple[str, str], codecs.IncrementalDecoder] = {}
        self._unfinished: dict[tuple[str, str], str] = {}

    def split(self, node: str, piece: Piece) -> Iterator[Line]:
        """The lines that this piece completes. Pieces of anything but a rank's two logs give none."""
        stream = piece.file.rpartition("/")[2].removesuffix(".log")
        if piece.rank is None or stream not in ("stdout", "stderr"):
            return
        key = (node, piece.file)
        if piece.offset == 0 or key not in self._decoders:
            self._decoders[key] = codecs.getincrementaldecoder("utf-8")("replace")
            self._unfinished[key] = ""
        text = self._unfinished[key] + self._decoders[key].decode(piece.data)
        # A lone carriage return redraws a line (progress bars): each drawing is a line of its own here.
        *whole, rest = re.split(r"\r?\n|\r(?!$)", text)
        while len(rest) > MAX_LINE_CHARS:
            whole.append(rest[:MAX_LINE_CHARS])
            rest = rest[MAX_LINE_CHARS:]
        self._unfinished[key] = rest
        for line in whole:
            yield Line(node, piece.rank, stream, clean(line)[:MAX_LINE_CHARS])

    def rest(self) -> Iterator[Line]:
        """What stood without a newline at the end."""
        for (node, file), text in self._unfinished.items():
            if clean(text):
                rank, _, name = file.partition("/")
                yield Line(node, int(rank.removeprefix("rank-")), name.removesuffix(".log"), clean(text))
        self._unfinished.clear()
