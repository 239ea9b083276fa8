"""Whole lines out of a growing file that comes in pieces.

>>> lines = WholeLines()
>>> lines.of(0, b'{"step": 1}\\n{"st')
b'{"step": 1}'
>>> lines.of(16, b'ep": 2}\\n')
b'{"step": 2}'

Where a piece is missing, what came before it is dropped, and what follows up to the next newline.
"""

from __future__ import annotations

from trainer.shared.metrics import LINE_LIMIT


class WholeLines:
    def __init__(self) -> None:
        self.unfinished = b""
        """The beginning of a line whose end has not come: never more than LINE_LIMIT bytes."""
        self._end = 0
        self._is_skipping = False  # until the end of a line whose beginning is not here

    def of(self, offset: int, data: bytes) -> bytes:
        """What this piece completes, without the last line's newline; b"" where it completes none.

        offset: where in its file the piece begins, in bytes.
        """
        if offset != self._end:
            self.unfinished, self._is_skipping = b"", True
        self._end = offset + len(data)
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            whole = whole.partition(b"\n")[2] if self._is_skipping else self.unfinished + whole
            self.unfinished, self._is_skipping = rest, False
        elif not self._is_skipping:
            self.unfinished += rest
        if len(self.unfinished) > LINE_LIMIT:
            self.unfinished, self._is_skipping = b"", True
        return whole
