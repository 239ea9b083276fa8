"""Gets Python stacks from a rank's prepared processes (`script_start`), its progress, and the kernel's byte counts.

    with asking(job.stacks(0)) as ask:      # one at a time; others wait
        ask(4711)                           # [Thread(is_main=True, frames=[("train.py", 12, "step"), ...])], or None

Only prepared processes get the signal: they handle it, and hold the file open at the descriptor that the file names.
Python writes within the handler, also during a lock or network wait; a system call is continued or restarted (PEP 475).

Each thread writes only its own stack: reading frames of a running thread causes a segmentation fault sooner or later.
The main thread is always asked, others only while they wait in a call (CALLS) that a signal does not interrupt for any
program, since they may not be Python's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import math
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .layout import JobFolder
from .processes import identify
from .stillness import FILES

ASKS = signal.SIGURG
ALONE_S = 7.0  # longest wait for another caller, longer than it may take
ANSWER_S, ALL_S = 3.0, 6.0  # time for one process to write, and for all; a process stuck in the kernel never writes
SETTLE_S = 0.2  # pause after which a stack counts as complete if its last line does not show it
CALLS = ("futex", "hrtimer_nanosleep", "pipe_read", "anon_pipe_read", "sk_wait", "wait_woken", "unix_stream_read")
"""Prefixes of kernel functions in which a thread may be asked (proc(5): `wchan`)."""
MOST_ASKED = 64  # threads of one process; few of them are Python's
LOOK_S = 0.002
MOST_BYTES = 1 << 16
MOST_THREADS = 12
MOST_FRAMES = 40
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}) in (.*)')
_OUTERMOST = re.compile(rb"in (<module>|_run_module_as_main|_bootstrap)\n$")  # the outermost frame of a thread

Frame = tuple[str, int, str]  # file, line and function


class Thread(NamedTuple):
    is_main: bool
    frames: list[Frame]  # the innermost first


@contextlib.contextmanager
def asking(file: Path) -> Iterator[Callable[[int], list[Thread] | None]]:
    """A call that returns one process's threads; None if it is not prepared or does not answer."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        yield lambda pid: None
        return
    try:
        header = os.pread(handle, 64, 0).partition(b"\n")[0]
        number = header.split()[1:2]
        if not number or not number[0].isdigit() or not _is_locked(handle):
            yield lambda pid: None
            return
        until_s = time.monotonic() + ALL_S
        yield lambda pid: _ask(pid, handle, int(number[0]), until_s)
        os.ftruncate(handle, len(header) + 1)  # keeps the file small
    finally:
        os.close(handle)


def _is_locked(handle: int) -> bool:
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
        for tid in [pid, *_waiting_threads(pid)]:
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


def _waiting_threads(pid: int) -> list[int]:
    tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid)
    return [tid for tid in tids if _task(pid, tid, "wchan").startswith(CALLS)][:MOST_ASKED]


def _task(pid: int, tid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/task/{tid}/{name}").read_text()
    return ""


def _signal(pid: int, tid: int) -> bool:
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None and tid == pid:
        os.kill(pid, ASKS)  # the main thread gets it first
        return True
    return tgkill is not None and tgkill(pid, tid, int(ASKS)) == 0


def _is_done(pid: int, tid: int) -> bool:
    # A waiting thread has handled the signal and waits again. The main thread's output shows its own end.
    if tid == pid:
        return False
    fields = dict(line.split(":\t", 1) for line in _task(pid, tid, "status").splitlines() if ":\t" in line)
    return not int(fields.get("SigPnd", "0"), 16) >> (ASKS - 1) & 1 and not fields.get("State", "").startswith("R")


def _is_prepared(pid: int, handle: int, number: int) -> bool:
    masks = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("SigCgt", "SigBlk"):
            masks[name] = int(value, 16) >> (ASKS - 1) & 1
    held = f"/proc/{pid}/fd/{number}"
    # Only a file of that name is examined: stat on another may block.
    if masks != {"SigCgt": 1, "SigBlk": 0} or not os.readlink(held).endswith("/stacks"):
        return False
    return os.path.samestat(os.stat(held), os.fstat(handle))


def _answer(handle: int, start: int, until_s: float, is_done: Callable[[], bool]) -> bytes:
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
    found = (_FRAME.fullmatch(line) for line in text.splitlines())
    return [(frame[1], int(frame[2]), frame[3]) for frame in found if frame][:MOST_FRAMES]


# A rank that waits for a slow link or disk uses no CPU and stays on one line, like a rank that waits for ever. The
# kernel counts the bytes that pass: sock_diag(7), and `diskstats` or NFS's `mountstats`. No file system is touched,
# since it may hang.
#
#     before = carried()                      # {inode of a socket: bytes so far}; {} if the kernel does not report them
#     disk_bytes(4711)                        # bytes read and written so far by the disk that it waits for

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, DUMP = 4, 20, 0x301
ERROR, DONE = 2, 3
INFO = 2  # attribute number of a `tcp_info` in an answer
HEADER, ATTRIBUTES = struct.Struct("=IHHII"), 72
INODE_AT, ACKED_AT = 68, 120  # offsets in an answer, and in `tcp_info`: bytes acknowledged, then bytes received
ESTABLISHED = 1 << 1
CARRIED_ANSWER_S, ANSWER_BYTES = 2.0, 1 << 18
SECTOR = 512


def carried() -> dict[int, int]:
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
    """For the disk whose file its main thread reads, writes or syncs now. 0 if unknown: the call names no open file,
    ptrace(2) rights are missing, or the file system reports nothing.
    """
    mount = _waited_for(pid)
    lines = (line.split() for line in _lines(f"/proc/{pid}/mountinfo"))
    rows = [row for row in lines if len(row) > 4 and row[0] == mount]
    return sum(sum(_of_device(row[2])) + sum(_of_nfs(pid, row[4])) for row in rows)


def _waited_for(pid: int) -> str:
    # Mount number of that file. Calls on files have a descriptor as first argument (proc(5): `syscall`).
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


# For `orch why`: a rank's log sizes, silence in seconds, newest step and longest step time.
#
# progress_of(job, 0)         # RankProgress(sizes=(120, 0, 4096), quiet_s=3.1, step=120, step_s=0.4)

TAIL_BYTES = 1 << 14  # read from the end of the metrics
MOST_STEP, MOST_S = 2**53, 1e9


class RankProgress(NamedTuple):
    sizes: tuple[int, ...]
    quiet_s: float  # since its last write, by the clock of its disk
    step: int | None  # the last step in its metrics
    step_s: float | None  # longest of the last steps, in seconds


def progress_of(job: JobFolder, rank: int) -> RankProgress:
    sizes, times = list[int](), list[float]()
    for name in FILES:
        try:
            found = os.stat(job.rank(rank) / name, follow_symlinks=False)
        except OSError:
            sizes.append(-1)
        else:
            sizes.append(found.st_size)
            times.append(found.st_mtime)
    quiet_s = min(MOST_S, max(0.0, time.time() - max(times))) if times else 0.0
    return RankProgress(tuple(sizes), quiet_s, *_steps(job, rank))


def _steps(job: JobFolder, rank: int) -> tuple[int | None, float | None]:
    last, longest_s = None, None
    for line in _tail(job, rank).split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") == "step":
                last = _step(event.get("step"), last)
                longest_s = _longest(event.get("t_ms"), longest_s)
    return last, longest_s


def _tail(job: JobFolder, rank: int) -> bytes:
    try:
        with open(job.rank(rank) / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES)
    except OSError:
        return b""


def _step(value: Any, before: int | None) -> int | None:
    return value if isinstance(value, int) and 0 <= value < MOST_STEP else before


def _longest(t_ms: Any, before: float | None) -> float | None:
    if not isinstance(t_ms, (int, float)) or not math.isfinite(t_ms) or not 0 <= t_ms < 1000 * MOST_S:
        return before
    return max(t_ms / 1000, before or 0.0)
