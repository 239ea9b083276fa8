"""Ends a rank on SIGINT and SIGTERM, even inside a collective that never returns.

watch(last_words=lambda: metrics.end("interrupted"))
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

GRACE_S = 3.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []


class Interrupted(KeyboardInterrupt):
    # A KeyboardInterrupt, so that torch's loader processes, which inherit the handler, end without a traceback.

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def watch(last_words: Callable[[], None]) -> None:
    """The first SIGINT or SIGTERM raises Interrupted; later signals are ignored."""
    # Python runs signal handlers only between its own instructions, and a rank may block in NCCL or Gloo for minutes.
    # So the C handler also wakes a thread through a pipe, which ends the process after GRACE_S.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for signum in _SIGNALS:
        signal.signal(signum, _interrupt)
    threading.Thread(target=_end_if_stuck, args=(reader, last_words), daemon=True).start()


def received() -> int | None:
    """The signal that interrupted this process, even if the script caught the exception."""
    return _received[0] if _received else None


def leave(exit_code: int) -> NoReturn:
    """Skips the clean-up, which can hang or abort in a broken process group."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for each loader that we end
    for loader in multiprocessing.active_children():
        loader.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    _received.append(signum)
    raise Interrupted(signum)


def _end_if_stuck(reader: int, last_words: Callable[[], None]) -> None:
    signum = 0
    while signum not in _SIGNALS:  # the loader's SIGCHLD handler also writes here
        signum = os.read(reader, 1)[0]
    time.sleep(GRACE_S)
    last_words()
    leave(128 + signum)


_PAUSE_S = 0.002
_CHECKS = 3
"""Consecutive: a thread that got the lock in a pause is seen running in the next check."""
_TASKS = Path("/proc/self/task")


def wait_for_threads(patience_s: float = 1.0) -> None:
    """Waits until no other thread is running. Call before the interpreter ends. patience_s: CPU time."""
    # torch's threads run our callbacks after the waiting thread has continued. A thread that asks for the interpreter's
    # lock during shutdown is unwound inside C++ that forbids it, and the process dies of SIGABRT (`terminate called
    # without an active exception`) although its work is done (pytorch/pytorch issues 38228 and 190489, open in 2026).
    until_s, at_rest = time.process_time() + patience_s, 0
    while at_rest < _CHECKS and time.process_time() < until_s:
        time.sleep(_PAUSE_S)  # lets threads that wait for the interpreter's lock have it
        at_rest = 0 if _others_run() else at_rest + 1


def _others_run() -> bool:
    own = str(threading.get_native_id())
    states = [_state(task) for task in _TASKS.iterdir() if task.name != own]
    return "R" in states


def _state(task: Path) -> str:
    """See proc(5). Empty if the thread has ended."""
    with contextlib.suppress(OSError):
        return (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""
