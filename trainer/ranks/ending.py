"""Ending well on SIGINT and SIGTERM, even inside a collective that will never return.

    watch(last_words=lambda: metrics.end("interrupted"))

The signal raises Interrupted in the main thread. But Python runs signal handlers between its own instructions, and a
rank whose peer has already left may sit in NCCL or Gloo for minutes. So a second thread also hears of the signal (the C
handler writes to a pipe at once), waits GRACE_S, and then ends the process with the same record and exit code.
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
    """A KeyboardInterrupt, so that torch's loader processes, which inherit the handler, end without a traceback."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def watch(last_words: Callable[[], None]) -> None:
    """From now on a first SIGINT or SIGTERM raises Interrupted; further ones are ignored."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for signum in _SIGNALS:
        signal.signal(signum, _interrupt)
    threading.Thread(target=_end_if_stuck, args=(reader, last_words), daemon=True).start()


def received() -> int | None:
    """The signal that interrupted this process, also if a script caught the exception."""
    return _received[0] if _received else None


def leave(exit_code: int) -> NoReturn:
    """Ends the process at once, without the clean-up that a broken process group can hang or abort in."""
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
    while signum not in _SIGNALS:  # the loader's SIGCHLD handler writes here too
        signum = os.read(reader, 1)[0]
    time.sleep(GRACE_S)
    last_words()
    leave(128 + signum)


# Before the interpreter ends: until no other thread of this process is at work.
#
#     let_others_rest()
#
# Torch's threads run our callbacks, and let go of what they have summed up, after whoever waits for the sum has gone
# on.
# For that they take the interpreter's lock, and one that asks for it while the interpreter ends is unwound in the
# middle
# of C++ that allows no such thing: the process dies of SIGABRT, `terminate called without an active exception`, though
# all its work is done (pytorch/pytorch issues 38228 and 190489, open in 2026).

_PAUSE_S = 0.002
_LOOKS = 3
"""In a row: a thread that had waited for the lock runs in one of the pauses, and is seen in the look after it."""
_TASKS = Path("/proc/self/task")


def let_others_rest(patience_s: float = 1.0) -> None:
    """patience_s: of the processor's time, for a thread that computes as long as the process lives. On a busy machine
    one that is to let go soon may wait far longer for its turn.
    """
    until_s, at_rest = time.process_time() + patience_s, 0
    while at_rest < _LOOKS and time.process_time() < until_s:
        time.sleep(_PAUSE_S)  # whoever waits for the interpreter's lock has it meanwhile
        at_rest = 0 if _others_run() else at_rest + 1


def _others_run() -> bool:
    own = str(threading.get_native_id())
    states = [_state(task) for task in _TASKS.iterdir() if task.name != own]
    return "R" in states


def _state(task: Path) -> str:
    """As proc(5) has it; empty for a thread that has ended."""
    with contextlib.suppress(OSError):
        return (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""
