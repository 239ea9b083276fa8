"""How much data has moved past a process that itself shows nothing of it: over its connections, or on its disks.

    before = carried()                      # {inode of a socket: bytes so far}; {} where the kernel does not say
    disk_bytes(4711)                        # what the disk that it waits for has read and written so far

A rank that waits for a slow link uses no CPU and stands at one line, as one that waits for ever; so does one whose
checkpoint is on its way to a slow disk. The kernel counts what gets through: sock_diag(7), and `diskstats`, or
`mountstats` of NFS. Nothing here touches a file system, which may be the dead one.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, DUMP = 4, 20, 0x301
ERROR, DONE = 2, 3
INFO = 2
"""The number of an answer's attribute that holds a `tcp_info`."""
HEADER, ATTRIBUTES = struct.Struct("=IHHII"), 72
INODE_AT, ACKED_AT = 68, 120
"""In an answer, and in `tcp_info`: the bytes that were confirmed, then those that came."""
ESTABLISHED = 1 << 1
ANSWER_S, ANSWER_BYTES = 2.0, 1 << 18
SECTOR = 512


def carried() -> dict[int, int]:
    """Of the established TCP connections of this host, or of its network namespace."""
    found = dict[int, int]()
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, struct.error):
            found |= dict(_of_family(family))
    return found


def _of_family(family: int) -> Iterator[tuple[int, int]]:
    wanted = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (INFO - 1), 0, ESTABLISHED)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as diag:
        diag.settimeout(ANSWER_S)
        diag.send(HEADER.pack(HEADER.size + len(wanted), SOCK_DIAG_BY_FAMILY, DUMP, 1, 0) + wanted)
        while True:
            answer, at = diag.recv(ANSWER_BYTES), 0
            while at < len(answer):
                size, kind, *_ = HEADER.unpack_from(answer, at)
                if kind in (ERROR, DONE) or size < HEADER.size:
                    return
                one = answer[at + HEADER.size : at + size]
                for info in _attributes(one, INFO):
                    inode = struct.unpack_from("=I", one, INODE_AT)[0]
                    yield inode, sum(struct.unpack_from("=QQ", info, ACKED_AT))
                at += (size + 3) & ~3


def _attributes(message: bytes, wanted: int) -> Iterator[bytes]:
    at = ATTRIBUTES
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        if size < 4:
            return
        if kind == wanted:
            yield message[at + 4 : at + size]
        at += (size + 3) & ~3


# ---- disks ----------------------------------------------------------------------------------------------------------


def disk_bytes(pid: int) -> int:
    """Of the disk of the file that its main thread reads, writes or syncs at this moment. 0 where nobody can know: the
    call names no open file, we may not see it (ptrace(2)), or the file system is of a kind that does not say.
    """
    mount = _waited_for(pid)
    lines = (line.split() for line in _lines(f"/proc/{pid}/mountinfo"))
    rows = [row for row in lines if len(row) > 4 and row[0] == mount]
    return sum(sum(_of_device(row[2])) + sum(_of_nfs(pid, row[4])) for row in rows)


def _waited_for(pid: int) -> str:
    """The number of that file's mount. Calls on files have their descriptor as first argument (proc(5): `syscall`)."""
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        handle = int(Path(f"/proc/{pid}/syscall").read_text().split()[1], 16)
        lines = _lines(f"/proc/{pid}/fdinfo/{handle}")
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)["mnt_id"]
    return ""


def _of_device(device: str) -> Iterator[int]:
    for row in (line.split() for line in _lines("/proc/diskstats")):
        if len(row) > 9 and f"{row[0]}:{row[1]}" == device:
            yield SECTOR * (int(row[5]) + int(row[9]))


def _of_nfs(pid: int, place: str) -> Iterator[int]:
    is_wanted = False
    for row in (line.split() for line in _lines(f"/proc/{pid}/mountstats")):
        if row[:1] == ["device"]:
            is_wanted = len(row) > 4 and row[4] == place
        elif is_wanted and row[:1] == ["bytes:"] and len(row) > 6:
            yield int(row[5]) + int(row[6])


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
