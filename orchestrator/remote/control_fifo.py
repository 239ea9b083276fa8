"""The two FIFOs in a job's folder: what its supervisor hears there, and how its ranks see that it lives.

    fifo = ControlFifo(job, heard)
    fifo.open()         # from now on heard({...}) is called for every line that comes
    fifo.drain()        # now, for what came already

One JSON object a line: requests of `control`, events of the rank wrappers (`rank`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

from .layout import JobFolder
from .plain_asyncio import asyncio

CHUNK_BYTES = 1 << 16


class ControlFifo:
    """heard: called with each line; where it raises ValueError or KeyError, the line was no message of ours."""

    def __init__(self, job: JobFolder, heard: Callable[[dict[str, Any]], None]) -> None:
        self._job, self._heard = job, heard
        self._control: int | None = None
        self._alive: int | None = None
        self._unread = b""

    def open(self) -> None:
        # Opened for both ways: no end of file when a writer leaves, and opening never waits for another side.
        self._control = os.open(self._job.control, os.O_RDWR | os.O_NONBLOCK)
        self._alive = os.open(self._job.alive, os.O_RDWR)
        asyncio.get_running_loop().add_reader(self._control, self.drain)

    def drain(self) -> None:
        """Reads every line that waits."""
        assert self._control is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._control, CHUNK_BYTES):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError):
                if isinstance(event := json.loads(line), dict):
                    self._heard(event)
