"""Carries what a rank prints from a pipe into its log file, so that a full disk never reaches the script.

    pump = Pump(job.rank(0) / "stdout.log")
    child = subprocess.Popen([...], stdout=pump.entry)
    pump.start()
    ...
    dropped = pump.finish()         # once the child has ended: every byte that it wrote is in the file, or is counted

The pipe is emptied whatever becomes of its content: what the disk does not take is dropped and counted, and a line in
the log says how much is missing there as soon as there is room for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
import threading
from pathlib import Path

from .print_times import PrintTimes

PIPE_BYTES = 1 << 20
BUFFER_BYTES = 1 << 18
"""Used again and again, so that it stays in the processor's cache: what a fresh megabyte a read costs is a third."""
ROOM_BYTES = 1 << 16
"""A disk that was full is written to again when it has this much room: not for every few bytes that come free."""


class Pump(threading.Thread):
    """entry: the pipe's end for the child; `start` closes ours."""

    def __init__(self, log: Path, times: PrintTimes | None = None) -> None:
        """times: notes when what is in the log was printed."""
        super().__init__(daemon=True, name=f"pump-{log.name}")
        self._file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        self._pipe, self.entry = os.pipe()
        with contextlib.suppress(OSError):  # beyond this user's share of pipe memory it stays at 64 KiB
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._over, self._end = os.pipe()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._times = times
        self._dropped = self._unreported = 0
        self._last = b"\n"

    def start(self) -> None:
        os.close(self.entry)
        super().start()

    def finish(self) -> int:
        """Empties the pipe, also where a child that was left behind holds it open. Returns the bytes dropped, ever."""
        os.close(self._end)
        self.join()
        if self._unreported:
            self._report()
        return self._dropped

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self._pipe, self._over], [], [])
            if self._over in ready:
                break
            if not self._carry(BUFFER_BYTES):
                return
        left = _waiting(self._pipe)  # what comes later is no longer the script's: it has ended
        while left and (size := self._carry(left)):
            left -= size

    def _carry(self, at_most: int) -> int:
        """One piece from the pipe to the file; its size, 0 at the pipe's end."""
        size = os.readv(self._pipe, [self._buffer[:at_most]])
        if size and self._times and self._times.is_due():
            self._times.note(self._file)
        self._put(self._buffer[:size])
        return size

    def _put(self, data: memoryview) -> None:
        if self._unreported and not (self._has_room() and self._report()):
            self._drop(len(data))
            return
        self._drop(len(data) - self._write(data))

    def _write(self, data: memoryview) -> int:
        """Writes what fits; returns how much that was."""
        written = 0
        with contextlib.suppress(OSError):
            while written < len(data):
                written += os.write(self._file, data[written:])
        if written:
            self._last = bytes(data[written - 1 : written])
        return written

    def _drop(self, size: int) -> None:
        self._dropped += size
        self._unreported += size

    def _report(self) -> bool:
        line = b"[orch] the disk was full: %d bytes of output are missing here\n" % self._unreported
        line = line if self._last == b"\n" else b"\n" + line
        if self._write(memoryview(line)) < len(line):
            return False
        self._unreported = 0
        return True

    def _has_room(self) -> bool:
        try:
            disk = os.fstatvfs(self._file)
        except OSError:  # a disk that fails: what is printed is dropped and counted, and the script goes on
            return False
        return disk.f_bavail * disk.f_frsize >= ROOM_BYTES


def _waiting(pipe: int) -> int:
    """Bytes that lie in the pipe now."""
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0])
