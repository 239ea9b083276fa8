"""Log bytes as printable lines: no control sequences, progress bars reduced to their final text. Pure."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.jobs.frames import FilePiece
from orchestrator.units import clean

# Anything that `units.clean` would change, or a carriage return: most pieces hold none.
_UNCLEAN = re.compile(r"[^\n\t\x20-\x7e]")


class LogLine(NamedTuple):
    node: str
    rank: int
    stream: str
    text: str
    wall: float | None = None
    """Seconds since 1970 by its host's clock, whole seconds; None if unknown."""


@dataclass(frozen=True)
class Bars:
    """The lines that ranks keep redrawing, at most one per log."""

    lines: tuple[LogLine, ...]


class Splitter:
    def __init__(self) -> None:
        self._decoders: dict[tuple[str, str], codecs.IncrementalDecoder] = {}
        self._drawings: dict[tuple[str, str], Drawing] = {}
        self._bars: tuple[LogLine, ...] = ()

    def split(self, node: str, piece: FilePiece) -> Iterator[LogLine]:
        """Only a rank's two logs give lines."""
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
            if len(line) <= MAX_ROW_CHARS:
                yield LogLine(node, piece.rank, stream, line, piece.wall)
            else:
                yield from (LogLine(node, piece.rank, stream, part, piece.wall) for part in _parts(line))
        too_long = max(0, len(rest) - 1) // MAX_ROW_CHARS * MAX_ROW_CHARS
        for part in _parts(rest[:too_long]):
            yield LogLine(node, piece.rank, stream, part, piece.wall)
        drawing.restart(rest[too_long:], piece.wall)

    def settle(self) -> Iterator[LogLine]:
        """Redrawn lines that are final by now; call it about once a second."""
        for key, drawing in self._drawings.items():
            yield from _lines(key, drawing.settle())

    def bars(self) -> Bars | None:
        """None if unchanged since the last call."""
        found = tuple(
            line for key, drawing in self._drawings.items() for line in _lines(key, [Final(drawing.shown, None)])
        )
        bars = tuple(line for line in found if line.text.strip())
        if bars == self._bars:
            return None
        self._bars = bars
        return Bars(bars)

    def rest(self) -> Iterator[LogLine]:
        """Unterminated last lines."""
        for key in list(self._drawings):
            yield from self._last(key)

    def _last(self, key: tuple[str, str]) -> Iterator[LogLine]:
        if key in self._drawings:
            yield from (line for line in _lines(key, self._drawings[key].rest()) if line.text)


def _lines(key: tuple[str, str], finals: Iterable[Final]) -> Iterator[LogLine]:
    node, file = key
    rank, _, name = file.partition("/")
    number, stream = int(rank.removeprefix("rank-")), name.removesuffix(".log")
    for text, wall in finals:
        yield LogLine(node, number, stream, clean(text), wall)


def _parts(text: str) -> list[str]:
    return [text[at : at + MAX_ROW_CHARS] for at in range(0, len(text), MAX_ROW_CHARS)]


# Redrawn lines, reduced to their final text. A progress bar prints a carriage return and draws again; several bars move
# down by newlines and up by `ESC [ n A` (CUU of ECMA-48), as tqdm does.
#
#     >>> drawing = Drawing()
#     >>> list(drawing.take("\r 10%\r 20%", 7.0)), drawing.shown
#     ([], ' 20%')
#     >>> [line.text for line in drawing.take("\r100%\nnext\n", 8.0)] + [line.text for line in drawing.rest()]
#     ['100%', 'next']

MAX_ROW_CHARS = 1 << 16
MAX_ROWS = 16
"""Open lines per log; of a longer block of bars the top lines become final."""
_STEPS = re.compile(r"(\r|\n|\x1b\[\d{0,3}A)")
_UNFINISHED_STEP = re.compile(r"\x1b(\[\d{0,3})?\Z")


class Final(NamedTuple):
    """wall: the time of its last drawing, if known."""

    text: str
    wall: float | None


class _Row:
    __slots__ = ("_before", "_returned", "is_drawn", "text", "wall")

    def __init__(self) -> None:
        self.text = ""
        self.wall: float | None = None
        self.is_drawn = False  # text came after a carriage return
        self._before = ""  # the last drawing that was not blank
        self._returned = False

    @property
    def shown(self) -> str:
        """The last visible text: an erased bar still counts."""
        return self._before if self._before and not clean(self.text).strip() else self.text

    def goes_back(self) -> None:
        self._returned = True

    def add(self, text: str, wall: float | None) -> None:
        self.wall = wall
        if self._returned:
            self._before, self.text = self.shown, ""
            self._returned, self.is_drawn = False, True
        self.text += text


class Drawing:
    """The end of one log: its open lines and the cursor."""

    def __init__(self) -> None:
        self._rows = [_Row()]
        self._at = 0
        self._drawn_at: int | None = None
        self._step = ""  # the beginning of an escape sequence
        self._wall: float | None = None

    @property
    def unfinished(self) -> str | None:
        """None if the log has several open lines, or redrew one."""
        row = self._rows[0]
        return row.text if len(self._rows) == 1 and not (row.is_drawn or self._step or row._returned) else None

    @property
    def shown(self) -> str:
        """ "" if no line is redrawn."""
        return "" if self._drawn_at is None else self._rows[self._drawn_at].shown

    def restart(self, unfinished: str, wall: float | None = None) -> None:
        self._rows, self._at, self._drawn_at = [_Row()], 0, None
        self._rows[0].text, self._rows[0].wall = unfinished, wall

    def take(self, text: str, wall: float | None = None) -> Iterator[Final]:
        """Yields the lines that become final, at most MAX_ROW_CHARS each."""
        self._wall = wall
        text = self._step + text
        cut = _UNFINISHED_STEP.search(text)
        self._step = cut[0] if cut else ""
        for part in _STEPS.split(text[: len(text) - len(self._step)]):
            if part == "\n":
                yield from self._goes_down()
            elif part == "\r":
                self._rows[self._at].goes_back()
            elif part.startswith("\x1b[") and part.endswith("A"):
                self._at = max(0, self._at - int(part[2:-1] or 1))
            elif part:
                yield from self._add(part)

    def settle(self) -> Iterator[Final]:
        """The program has left the lines above the cursor."""
        yield from self._final(self._at)

    def rest(self) -> Iterator[Final]:
        if self._step:
            self._rows[self._at].add(self._step, self._wall)
        self._step = ""
        yield from self._final(len(self._rows) - 1)
        if self._rows[0].shown:
            yield Final(self._rows[0].shown, self._rows[0].wall)
        self.restart("")

    def _add(self, text: str) -> Iterator[Final]:
        row = self._rows[self._at]
        row.add(text, self._wall)
        if row.is_drawn:
            self._drawn_at = self._at
        while len(row.text) > MAX_ROW_CHARS:
            yield Final(row.text[:MAX_ROW_CHARS], row.wall)
            row.text = row.text[MAX_ROW_CHARS:]

    def _goes_down(self) -> Iterator[Final]:
        self._at += 1
        if self._at < len(self._rows):
            self._rows[self._at].goes_back()
            return
        self._rows.append(_Row())
        if not self._rows[self._at - 1].is_drawn:
            yield from self._final(self._at)
        elif len(self._rows) > MAX_ROWS:
            yield from self._final(1)

    def _final(self, count: int) -> Iterator[Final]:
        done, self._rows = self._rows[:count], self._rows[count:]
        self._at = max(0, self._at - count)
        if self._drawn_at is not None:
            self._drawn_at = self._drawn_at - count if self._drawn_at >= count else None
        for row in done:
            if row.shown or not row.is_drawn:
                yield Final(row.shown, row.wall)
