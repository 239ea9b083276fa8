"""Whether a rank has met the others: a process group cannot be joined without a TCP connection to one of them.

    meeting = Meeting(port, others)         # before the rank's script starts
    meeting.look(pid)                       # now and then: whether one of its processes has such a connection
    meeting.is_over()                       # at its end: whether there was one, also where nobody looked in time

The rendezvous store, which `init_process_group` connects to and keeps, lies at `port`. A script that meets by ways of
its own connects to another host of the job, or to somebody else on this one. Only a rank for which none of these was
ever seen counts as alone: what is seen too much costs a warning, what is seen too little would be a false one.
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

Place = tuple[str, int]
"""A numeric address and a port."""


class Row(NamedTuple):
    """A TCP connection as the kernel lists it (proc(5), net/tcp)."""

    ours: Place
    theirs: Place
    state: int
    inode: int
    """0 where no process holds it."""
    unsent: int = 0
    """Bytes that the other side has not confirmed."""
    unread: int = 0
    """Bytes that came and nobody here has taken."""
    retransmits: int = 0
    """How often in a row the same bytes were sent again, and no word came."""


class Meeting:
    """port: of the rendezvous. others: the training addresses of the job's other hosts."""

    def __init__(self, port: int, others: Collection[str] = ()) -> None:
        self._port, self._others = port, frozenset(others)
        self._before = self._left_over()
        self.seen = False

    def look(self, pid: int) -> bool:
        """Whether a connection was seen, now or before, of this process or one below it."""
        if not self.seen and (inodes := sockets_of([pid, *(one.pid for one in descendants(pid))])):
            rows = [row for row in connections() if row.state == ESTABLISHED]
            own = {row.ours for row in rows if row.inode in inodes}
            here = {row.ours for row in rows} - own
            self.seen = any(self._meets(row, here) for row in rows if row.inode in inodes)
        return self.seen

    def is_over(self) -> bool:
        """The same once the script has ended: what it closed the kernel keeps in mind for a minute (TIME_WAIT)."""
        self.seen = self.seen or bool(self._left_over() - self._before)
        return self.seen

    def _meets(self, row: Row, here: set[Place]) -> bool:
        """here: the ends of connections on this host that others have."""
        return row.theirs[1] == self._port or row.theirs[0] in self._others or row.theirs in here

    def _left_over(self) -> set[Place]:
        return {row.ours for row in connections() if not row.inode and row.theirs[1] == self._port}


def sockets_of(pids: Collection[int]) -> set[int]:
    """The inodes of the sockets that these processes hold."""
    found = set[int]()
    for folder in (f"/proc/{pid}/fd" for pid in pids):
        with contextlib.suppress(OSError):  # it has ended
            for handle in os.listdir(folder):
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    kind, _, inode = os.readlink(f"{folder}/{handle}").partition(":[")
                    found |= {int(inode[:-1])} if kind == "socket" else set()
    return found


def connections() -> Iterator[Row]:
    """Every TCP connection of this host, or of its network namespace."""
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
