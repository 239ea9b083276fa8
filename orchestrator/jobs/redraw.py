r"""What a program draws over itself, folded to what it shows in the end. Pure.

A progress bar writes its line again and again, each drawing after a carriage return; several bars below each other go
down by newlines and up again by `ESC [ n A` (CUU of ECMA-48), as tqdm does.

    >>> drawing = Drawing()
    >>> list(drawing.take("\r 10%\r 20%", 7.0)), drawing.shown
    ([], ' 20%')
    >>> [line.text for line in drawing.take("\r100%\nnext\n", 8.0)] + [line.text for line in drawing.rest()]
    ['100%', 'next']
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from orchestrator.text import clean

MAX_ROW_CHARS = 1 << 16
MAX_ROWS = 16
"""So many bars stand below each other; a longer list of finished ones begins to be final at its top."""
_STEPS = re.compile(r"(\r|\n|\x1b\[\d{0,3}A)")
_UNFINISHED_STEP = re.compile(r"\x1b(\[\d{0,3})?\Z")


class Final(NamedTuple):
    """A line that changes no more. wall: when it was drawn last, as far as that was said."""

    text: str
    wall: float | None


class _Row:
    """One line, as long as it may be drawn over."""

    __slots__ = ("_before", "_returned", "is_drawn", "text", "wall")

    def __init__(self) -> None:
        self.text = ""
        self.wall: float | None = None
        self.is_drawn = False  # something came after a carriage return
        self._before = ""  # the last drawing that showed anything
        self._returned = False

    @property
    def shown(self) -> str:
        """What a person last saw of it: an erased bar is still the last thing there was."""
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
    """The end of one log: the lines that may still change, and where the next letter goes."""

    def __init__(self) -> None:
        self._rows = [_Row()]
        self._at = 0
        self._drawn_at: int | None = None
        self._step = ""  # the beginning of one
        self._wall: float | None = None

    @property
    def unfinished(self) -> str | None:
        """The line so far, of a log whose only open line has never been drawn over; else None."""
        row = self._rows[0]
        return row.text if len(self._rows) == 1 and not (row.is_drawn or self._step or row._returned) else None

    @property
    def shown(self) -> str:
        """What the line that was drawn last shows now; "" where none is being drawn."""
        return "" if self._drawn_at is None else self._rows[self._drawn_at].shown

    def restart(self, unfinished: str, wall: float | None = None) -> None:
        """With this as its only line, which was printed then."""
        self._rows, self._at, self._drawn_at = [_Row()], 0, None
        self._rows[0].text, self._rows[0].wall = unfinished, wall

    def take(self, text: str, wall: float | None = None) -> Iterator[Final]:
        """Gives the lines that are final with it, at most MAX_ROW_CHARS each. wall: when this text was printed."""
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
        """Gives the lines above the one where the program writes now: it has left them for good."""
        yield from self._final(self._at)

    def rest(self) -> Iterator[Final]:
        """Gives what is left at the end."""
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
        """The first `count` rows are taken away."""
        done, self._rows = self._rows[:count], self._rows[count:]
        self._at = max(0, self._at - count)
        if self._drawn_at is not None:
            self._drawn_at = self._drawn_at - count if self._drawn_at >= count else None
        for row in done:
            if row.shown or not row.is_drawn:
                yield Final(row.shown, row.wall)
