"""Detects whether a rank has joined the others: every process group opens a TCP connection to one of them.

    meeting = Meeting(port, others)         # before the rank's script starts
    meeting.look(pid)                       # repeatedly: one of its processes has such a connection
    meeting.is_over()                       # at its end: it had one, also between two looks

`init_process_group` connects to the rendezvous store at `port`; a script with its own rendezvous connects to another
host of the job, or to another process on this one. In doubt a rank has joined: a false warning is worse than a
missing warning.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

from .processes import descendants

TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
ESTABLISHED = 1
_MAPPED = bytes(10) + b"\xff\xff"

Place = tuple[str, int]  # a numeric address and a port


class Row(NamedTuple):
    """A TCP connection as the kernel lists it (proc(5), net/tcp)."""

    ours: Place
    theirs: Place
    state: int
    inode: int  # 0 if no process holds it
    unsent: int = 0  # bytes that the other side has not acknowledged
    unread: int = 0  # bytes received that no process has read
    retransmits: int = 0  # retransmissions in a row without an answer


class Meeting:
    """port: of the rendezvous. others: training addresses of the job's other hosts."""

    def __init__(self, port: int, others: Collection[str] = ()) -> None:
        self._port, self._others = port, frozenset(others)
        self._before = self._left_over()
        self.seen = False

    def look(self, pid: int) -> bool:
        if not self.seen and (inodes := sockets_of([pid, *(one.pid for one in descendants(pid))])):
            rows = [row for row in connections() if row.state == ESTABLISHED]
            own = {row.ours for row in rows if row.inode in inodes}
            here = {row.ours for row in rows} - own
            self.seen = any(self._meets(row, here) for row in rows if row.inode in inodes)
        return self.seen

    def is_over(self) -> bool:
        # After the script's end: the kernel remembers its closed connections for a minute (TIME_WAIT).
        self.seen = self.seen or bool(self._left_over() - self._before)
        return self.seen

    def _meets(self, row: Row, here: set[Place]) -> bool:
        return row.theirs[1] == self._port or row.theirs[0] in self._others or row.theirs in here

    def _left_over(self) -> set[Place]:
        return {row.ours for row in connections() if not row.inode and row.theirs[1] == self._port}


def sockets_of(pids: Collection[int]) -> set[int]:
    found = set[int]()
    for folder in (f"/proc/{pid}/fd" for pid in pids):
        with contextlib.suppress(OSError):  # it has ended
            for handle in os.listdir(folder):
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    kind, _, inode = os.readlink(f"{folder}/{handle}").partition(":[")
                    found |= {int(inode[:-1])} if kind == "socket" else set()
    return found


def connections() -> Iterator[Row]:
    for table in TABLES:
        try:
            with open(table) as file:
                next(file, None)
                for line in file:
                    fields = line.split()
                    unsent, unread = (int(size, 16) for size in fields[4].split(":"))
                    ends = _place(fields[1]), _place(fields[2])
                    yield Row(*ends, int(fields[3], 16), int(fields[9]), unsent, unread, int(fields[6], 16))
        except (OSError, ValueError, IndexError):
            continue


def _place(text: str) -> Place:
    """`0100007F:7531`: the address in 32-bit words of this machine's byte order, the port in hex."""
    address, _, port = text.partition(":")
    words = struct.pack(f"={len(address) // 8}I", *(int(address[at : at + 8], 16) for at in range(0, len(address), 8)))
    packed = words[12:] if words.startswith(_MAPPED) else words
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed), int(port, 16)
