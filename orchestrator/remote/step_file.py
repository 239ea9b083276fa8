"""Appends the records of steps that are seen from outside to a rank's metrics file, until the script writes its own.

    file = StepFile(path)                    before the script begins
    file.write([("step", {...}), ...])       raises GaveWay where somebody else writes there, OSError where nobody can

The records are those of `trainer.shared.metrics`, which no host has for a script that does not train by it. A field
that is not known is absent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any


class GaveWay(Exception):
    """The script writes records of its own: there is no more to write."""


class StepFile:
    """A rank that was started again goes on behind what its first start has left."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._begins = self._ends = _size(path)
        """Bytes, or None before the file is there: what lies between is ours."""
        self._file: int | None = None
        self._first = b""

    def write(self, events: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """events: name and fields each."""
        lines = [json.dumps({"event": event, **fields}) for event, fields in events]
        data = "".join(f"{line}\n" for line in lines).encode()
        if _size(self._path) != self._ends:
            self._give_way()
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._begins = self._ends = self._begins or 0
            self._first = data[: data.index(b"\n") + 1]
        written = os.write(self._file, data)
        self._ends = (self._ends or 0) + written
        if written < len(data):
            raise OSError("the disk is full")

    def _give_way(self) -> None:
        """Takes away what is ours, so that the script's records alone are left. Raises GaveWay."""
        if self._file is not None and os.pread(self._file, len(self._first), self._begins or 0) == self._first:
            theirs = b""
            while part := os.pread(self._file, 1 << 20, (self._ends or 0) + len(theirs)):
                theirs += part
            os.ftruncate(self._file, self._begins or 0)
            os.write(self._file, theirs)
        raise GaveWay


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None
