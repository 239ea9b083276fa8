"""Where the Python threads of a rank stand: asks processes that `script_start` has prepared, one after the other.

    with asking(job.stacks(0)) as ask:      # alone: who else asks meanwhile waits
        ask(4711)                           # [Thread(is_main=True, frames=[("train.py", 12, "step"), ...])], or None

Nothing is sent to a process that is not proved to be prepared: it has a handler for the signal, and holds the file open
under the number that the file names. Python writes from within that handler, also while a lock or the network is waited
for; a system call that is waited in goes on, or is called again by Python itself (PEP 475). It reads other threads'
frames while they run, as everything that is made with `faulthandler` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .processes import identify

ASKS = signal.SIGURG
ALONE_S = 5.0
"""So long who asks waits for another who does."""
ANSWER_S, ALL_S = 3.0, 8.0
"""So long one process may take to write, and all together; one that is stuck in the kernel never does."""
SETTLE_S = 0.2
"""Who has written nothing more for so long has written all, where its last line does not say so."""
LOOK_S = 0.002
MOST_BYTES = 1 << 16
MOST_THREADS = 12
MOST_FRAMES = 40
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\)")
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}) in (.*)')
_OUTERMOST = re.compile(rb"in (<module>|_run_module_as_main)\n$")
"""What the main thread, which is written last, began with."""

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
    with contextlib.suppress(OSError):  # it has ended
        process = identify(pid)
        start = os.fstat(handle).st_size
        if _is_prepared(pid, handle, number):
            if thread := _thread_that_can(pid):
                _send_to_thread(pid, thread)
            else:
                process.signal(ASKS)
            return threads_of(_answer(handle, start, until_s).decode(errors="replace")) or None
    return None


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


def _thread_that_can(pid: int) -> int | None:
    """Another thread, where the main one waits in the kernel and takes no signal: whichever writes writes for all."""
    if _state(pid, pid) != "D":
        return None
    others = (int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid)
    return next((thread for thread in others if _state(pid, thread) in ("R", "S")), None)


def _state(pid: int, thread: int) -> str:
    return Path(f"/proc/{pid}/task/{thread}/stat").read_text(errors="replace").rpartition(") ")[2][:1]


def _send_to_thread(pid: int, thread: int) -> None:
    import ctypes  # slow to import, and seldom needed

    with contextlib.suppress(AttributeError):  # glibc before 2.30
        ctypes.CDLL(None).tgkill(pid, thread, int(ASKS))


def _answer(handle: int, start: int, until_s: float) -> bytes:
    """What is written from there on, once all of it has been."""
    deadline, grew_s, found = min(until_s, time.monotonic() + ANSWER_S), time.monotonic(), b""
    while time.monotonic() < deadline and len(found) < MOST_BYTES:
        if more := os.pread(handle, MOST_BYTES, start + len(found)):
            found, grew_s = found + more, time.monotonic()
        if _OUTERMOST.search(found) or (found and time.monotonic() > grew_s + SETTLE_S):
            break
        time.sleep(LOOK_S)
    return found[:MOST_BYTES]


def threads_of(text: str) -> list[Thread]:
    """As `faulthandler` writes them, the main thread first: it is the oldest, which is written last."""
    threads = list[list[Frame]]()
    for line in text.splitlines():
        if _THREAD.fullmatch(line.rstrip(":")):
            threads.append([])
        elif threads and (found := _FRAME.fullmatch(line)) and len(threads[-1]) < MOST_FRAMES:
            threads[-1].append((found[1], int(found[2]), found[3]))
    return [Thread(at == 0, frames) for at, frames in enumerate(reversed(threads))][:MOST_THREADS]
