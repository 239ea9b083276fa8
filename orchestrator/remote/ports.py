"""The port that the ranks meet at: one that nobody has, kept for its job until torchrun listens on it.

    claim = claim_port(29500)      # that port where it is free, else another; kept for as long as `claim` lives
    holder(29500)                  # "pid 4711 (python -m http.server 29500)"

Two things keep it. A name among the abstract Unix sockets, which Linux has once a network, as it has TCP ports
(unix(7)): no other job of ours takes the port in the same moment, whatever its user and work folder. And a socket that
is bound and does not listen: the kernel hands the port to nobody who asks for any port, and to no server that wants it
for itself; torchrun sets SO_REUSEADDR, and may listen on it (socket(7)).
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import NamedTuple

from .processes import describe, identify

TRIES = 20
_LISTENS = "0A"


class Claim(NamedTuple):
    number: int
    kept_by: tuple[socket.socket, socket.socket]


def claim_port(wanted: int) -> Claim:
    """Raises OSError where this host has no free port."""
    for port in (wanted, *[0] * TRIES):
        with contextlib.suppress(OSError):
            return _claim(port)
    raise OSError("no free TCP port")


def _claim(port: int) -> Claim:
    bound, name = socket.socket(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("", port))  # on every address, as torchrun will
        number = int(bound.getsockname()[1])
        name.bind(f"\0orch-rendezvous-{number}")
    except OSError:
        bound.close()
        name.close()
        raise
    return Claim(number, (bound, name))


def holder(port: int) -> str:
    """Who listens on this port, as far as we may see it."""
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(table, port)}
    for pid in os.listdir("/proc") if sockets else ():
        with contextlib.suppress(OSError):  # another user's, or gone
            folder = f"/proc/{int(pid)}/fd" if pid.isdigit() else ""
            if folder and any(os.readlink(f"{folder}/{fd}") in sockets for fd in os.listdir(folder)):
                return describe(identify(int(pid)))
    return "a process of another user" if sockets else "a process that has left again"


def _listening(table: str, port: int) -> list[str]:
    """Inodes of the listening sockets on this port (proc(5), /proc/net/tcp)."""
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        return [row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port]
    return []
