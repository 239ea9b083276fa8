"""Bytes of a log into lines for a person: decoded, cut to a length, nothing in them that a terminal obeys. Pure.

The raw files keep every byte; this is only the view. Besides what `text.clean` takes care of, a rank may print carriage
returns that overwrite, half a UTF-8 character at the end of a piece, and a line of 100 MB.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import NamedTuple

from orchestrator.frames import Piece
from orchestrator.text import clean

MAX_LINE_CHARS = 1 << 16
# What `text.clean` would change, or what is more than the end of a line: most pieces hold none of it.
_UNCLEAN = re.compile(r"[^\n\t\x20-\x7e]")


class Line(NamedTuple):
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
            yield from self._last(key)  # of an older generation of this file
            self._decoders[key] = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._unfinished.get(key, "") + self._decoders[key].decode(piece.data)
        plain = not _UNCLEAN.search(text)
        # A lone carriage return redraws a line (progress bars): each drawing is a line of its own here.
        *whole, rest = text.split("\n") if plain else re.split(r"\r?\n|\r(?!$)", text)
        too_long = max(0, len(rest) - 1) // MAX_LINE_CHARS * MAX_LINE_CHARS
        whole += _parts(rest[:too_long])
        self._unfinished[key] = rest[too_long:]
        for line in whole:
            if plain and len(line) <= MAX_LINE_CHARS:
                yield Line(node, piece.rank, stream, line)
            else:
                for part in _parts(line) or [""]:
                    yield Line(node, piece.rank, stream, clean(part))

    def rest(self) -> Iterator[Line]:
        """What stood without a newline at the end."""
        for key in list(self._unfinished):
            yield from self._last(key)

    def _last(self, key: tuple[str, str]) -> Iterator[Line]:
        text = clean(self._unfinished.pop(key, ""))
        if text:
            node, file = key
            rank, _, name = file.partition("/")
            yield Line(node, int(rank.removeprefix("rank-")), name.removesuffix(".log"), text)


def _parts(text: str) -> list[str]:
    """In lines of at most MAX_LINE_CHARS."""
    return [text[at : at + MAX_LINE_CHARS] for at in range(0, len(text), MAX_LINE_CHARS)]
