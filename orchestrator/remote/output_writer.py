"""Writes a rank's output from a pipe into its log file, so that a full disk never blocks the script.

    writer = OutputWriter(job.rank(0) / "stdout.log")
    child = subprocess.Popen([...], stdout=writer.entry)
    writer.start()
    ...
    dropped = writer.finish()         # after the child's end: every byte is in the file or counted

Output that the disk does not take is dropped and counted; once there is room, a line in the log reports the number of
missing bytes.
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
"""Reused, so that it stays in the processor's cache: a third of the cost of a fresh megabyte per read."""
ROOM_BYTES = 1 << 16  # after a full disk, writing resumes at this much free space, not for a few bytes


class OutputWriter(threading.Thread):
    """entry: the pipe's end for the child; `start` closes ours."""

    def __init__(self, log: Path, times: PrintTimes | None = None) -> None:
        super().__init__(daemon=True, name=f"output-{log.name}")
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
        """Empties the pipe, even if a remaining child holds it open. Returns the total of dropped bytes."""
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
        left = _waiting(self._pipe)  # later bytes are not the script's: it has ended
        while left and (size := self._carry(left)):
            left -= size

    def _carry(self, at_most: int) -> int:
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
        except OSError:  # a failing disk: output is dropped and counted
            return False
        return disk.f_bavail * disk.f_frsize >= ROOM_BYTES


def _waiting(pipe: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0])
