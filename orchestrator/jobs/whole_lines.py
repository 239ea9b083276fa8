"""Complete lines from a growing file that comes in pieces.

>>> lines = WholeLines()
>>> lines.of(0, b'{"step": 1}\\n{"st')
b'{"step": 1}'
>>> lines.of(16, b'ep": 2}\\n')
b'{"step": 2}'

If a piece is missing, the unfinished line before it is dropped, and the bytes up to the next newline.
"""

from __future__ import annotations

from trainer.shared.metrics import LINE_LIMIT


class WholeLines:
    def __init__(self) -> None:
        self.unfinished = b""
        """The beginning of a line whose end has not come; at most LINE_LIMIT bytes."""
        self._end = 0
        self._is_skipping = False  # until the end of a line whose beginning is not here

    def of(self, offset: int, data: bytes) -> bytes:
        """The lines that this piece completes, without the last newline; b"" if none. offset: where in its file the
        piece begins, in bytes.
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
