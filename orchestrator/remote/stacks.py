"""Where the Python threads of a rank stand: asks processes that `script_start` has prepared, one after the other.

    with asking(job.stacks(0)) as ask:      # alone: who else asks meanwhile waits
        ask(4711)                           # [Thread(is_main=True, frames=[("train.py", 12, "step"), ...])], or None

Nothing is sent to a process that is not proved to be prepared: it has a handler for the signal, and holds the file open
under the number that the file names. Python writes from within that handler, also while a lock or the network is waited
for; a system call that is waited in goes on, or is called again by Python itself (PEP 475).

Each thread writes its own stack alone: one that reads the frames of another while that runs ends the process by SIGSEGV
sooner or later. The main thread is always asked. Nobody knows which of the others are Python's: those are asked that
wait in a call (CALLS) which a signal interrupts for no program, were it a C library's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .processes import identify

ASKS = signal.SIGURG
ALONE_S = 7.0
"""So long who asks waits for another who does: longer than that one may take."""
ANSWER_S, ALL_S = 3.0, 6.0
"""So long one process may take to write, and all together; one that is stuck in the kernel never does."""
SETTLE_S = 0.2
"""Who has written nothing more for so long has written all, where its last line does not say so."""
CALLS = ("futex", "hrtimer_nanosleep", "pipe_read", "anon_pipe_read", "sk_wait", "wait_woken", "unix_stream_read")
"""What the names begin with of what in the kernel a thread may wait for and be asked (proc(5): `wchan`)."""
MOST_ASKED = 64
"""Threads of one process, of which most are seldom Python's."""
LOOK_S = 0.002
MOST_BYTES = 1 << 16
MOST_THREADS = 12
MOST_FRAMES = 40
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}) in (.*)')
_OUTERMOST = re.compile(rb"in (<module>|_run_module_as_main|_bootstrap)\n$")
"""What a thread began with."""

Frame = tuple[str, int, str]
"""File, line and function."""


class Thread(NamedTuple):
    is_main: bool
    frames: list[Frame]
    """The innermost first."""


@contextlib.contextmanager
def asking(file: Path) -> Iterator[Callable[[int], list[Thread] | None]]:
    """A call that asks one process for its threads; None of one that is not prepared, or does not answer."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        yield lambda pid: None
        return
    try:
        header = os.pread(handle, 64, 0).partition(b"\n")[0]
        number = header.split()[1:2]
        if not number or not number[0].isdigit() or not _is_alone(handle):
            yield lambda pid: None
            return
        until_s = time.monotonic() + ALL_S
        yield lambda pid: _ask(pid, handle, int(number[0]), until_s)
        os.ftruncate(handle, len(header) + 1)  # so that it stays small, however often it is asked
    finally:
        os.close(handle)


def _is_alone(handle: int) -> bool:
    deadline = time.monotonic() + ALONE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(10 * LOOK_S)
    return False


def _ask(pid: int, handle: int, number: int, until_s: float) -> list[Thread] | None:
    found = list[Thread]()
    with contextlib.suppress(OSError):  # it has ended
        process = identify(pid)
        for tid in [pid, *_patient(pid)]:
            if len(found) == MOST_THREADS or not process.is_alive() or not _is_prepared(pid, handle, number):
                break
            start = os.fstat(handle).st_size
            if not _signal(pid, tid):
                break
            answer = _answer(handle, start, until_s, functools.partial(_is_done, pid, tid))
            if frames := frames_of(answer.decode(errors="replace")):
                found.append(Thread(tid == pid, frames))
            elif tid == pid:
                break  # it does not answer
    return found or None


def _patient(pid: int) -> list[int]:
    """The threads beside the main one that may be asked, the oldest first."""
    tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid)
    return [tid for tid in tids if _task(pid, tid, "wchan").startswith(CALLS)][:MOST_ASKED]


def _task(pid: int, tid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/task/{tid}/{name}").read_text()
    return ""


def _signal(pid: int, tid: int) -> bool:
    """Signals this thread; False where it has ended, or where the C library cannot."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None and tid == pid:
        os.kill(pid, ASKS)  # the main thread is the first to get it
        return True
    return tgkill is not None and tgkill(pid, tid, int(ASKS)) == 0


def _is_done(pid: int, tid: int) -> bool:
    """Whether a thread that waited has taken the signal, and waits again; the main one says so itself."""
    if tid == pid:
        return False
    fields = dict(line.split(":\t", 1) for line in _task(pid, tid, "status").splitlines() if ":\t" in line)
    return not int(fields.get("SigPnd", "0"), 16) >> (ASKS - 1) & 1 and not fields.get("State", "").startswith("R")


def _is_prepared(pid: int, handle: int, number: int) -> bool:
    """Whether it has a handler for the signal, which none of its settings keeps from being called, and that is ours."""
    masks = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("SigCgt", "SigBlk"):
            masks[name] = int(value, 16) >> (ASKS - 1) & 1
    held = f"/proc/{pid}/fd/{number}"
    if masks != {"SigCgt": 1, "SigBlk": 0} or not os.readlink(held).endswith("/stacks"):  # another may not be looked at
        return False
    return os.path.samestat(os.stat(held), os.fstat(handle))


def _answer(handle: int, start: int, until_s: float, is_done: Callable[[], bool]) -> bytes:
    """What is written from there on, once all of it has been."""
    deadline, grew_s, found = min(until_s, time.monotonic() + ANSWER_S), time.monotonic(), b""
    while time.monotonic() < deadline and len(found) < MOST_BYTES:
        done = is_done()
        if more := os.pread(handle, MOST_BYTES, start + len(found)):
            found, grew_s = found + more, time.monotonic()
        if done or _OUTERMOST.search(found) or (found and time.monotonic() > grew_s + SETTLE_S):
            break
        time.sleep(LOOK_S)
    return found[:MOST_BYTES]


def frames_of(text: str) -> list[Frame]:
    """As `faulthandler` writes them."""
    found = (_FRAME.fullmatch(line) for line in text.splitlines())
    return [(frame[1], int(frame[2]), frame[3]) for frame in found if frame][:MOST_FRAMES]


# How much data has moved past a process that itself shows nothing of it: over its connections, or on its disks.
#
#     before = carried()                      # {inode of a socket: bytes so far}; {} where the kernel does not say
#     disk_bytes(4711)                        # what the disk that it waits for has read and written so far
#
# A rank that waits for a slow link uses no CPU and stands at one line, as one that waits for ever; so does one whose
# checkpoint is on its way to a slow disk. The kernel counts what gets through: sock_diag(7), and `diskstats`, or
# `mountstats` of NFS. Nothing here touches a file system, which may be the dead one.

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, DUMP = 4, 20, 0x301
ERROR, DONE = 2, 3
INFO = 2
"""The number of an answer's attribute that holds a `tcp_info`."""
HEADER, ATTRIBUTES = struct.Struct("=IHHII"), 72
INODE_AT, ACKED_AT = 68, 120
"""In an answer, and in `tcp_info`: the bytes that were confirmed, then those that came."""
ESTABLISHED = 1 << 1
CARRIED_ANSWER_S, ANSWER_BYTES = 2.0, 1 << 18
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
        diag.settimeout(CARRIED_ANSWER_S)
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
