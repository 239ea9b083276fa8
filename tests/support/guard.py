"""A test run with workers leaves nothing, however it ends: a process above it outlives it and ends what is left.

Pytest and its workers have a process group of their own: a signal to the run's group (Ctrl-C, a closed terminal), to
make or to the guard reaches the guard only, and pytest gets one SIGINT for it. So no program that takes something down
is ended by the same signal. Pytest then has GRACE_S; a second signal ends it at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from types import FrameType

GRACE_S = 60.0
SWEEP_S = 20.0
APART_S = 1.0
"""A shell and the kernel both send SIGHUP when a terminal closes: signals within this time are one."""
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def stand_guard() -> None:
    """Returns only in a forked process, which goes on as pytest."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whatever loses its parent becomes the guard's child
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    guard = os.getpid()
    child = os.fork()
    if child:
        code = 1
        try:
            code = _Guard(child).wait()
            _sweep()
        finally:
            os._exit(code)
    os.setpgid(0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if os.getppid() != guard:  # it was killed before the kernel could promise us a signal
        raise KeyboardInterrupt


class _Guard:
    def __init__(self, child: int) -> None:
        self._child, self._first_s = child, 0.0
        for number in ENDS:
            signal.signal(number, self._end)
        signal.signal(signal.SIGALRM, lambda *_: self._send(signal.SIGKILL))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)

    def wait(self) -> int:
        """The exit code of pytest. Reaps orphans meanwhile, as init does."""
        while (found := os.waitpid(-1, 0))[0] != self._child:
            pass
        self._child = 0
        signal.alarm(0)
        code = os.waitstatus_to_exitcode(found[1])
        return code if code >= 0 else 128 - code

    def _end(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self._first_s:
            self._first_s = now_s
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
            self._send(signal.SIGINT)
        elif now_s > self._first_s + APART_S:
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._child:
            os.kill(self._child, number)


def _sweep() -> None:
    """Ends all descendants, then removes the laboratories of test runs that are gone."""
    until_s = time.monotonic() + SWEEP_S
    while (left := descendants(os.getpid())) and time.monotonic() < until_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)
    if os.geteuid() == 0:
        from tests.support import lab  # after the fork: its imports are the tests'

        lab.remove_the_dead()


def descendants(pid: int) -> list[int]:
    """Each before its children. Those of any thread."""
    found = []
    with contextlib.suppress(OSError):  # it has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found
