"""Deadlines that stand still while the host is not the cause of a delay.

    deadline = Deadline(10)
    with deadline.paused():            # a person types a passphrase, or our own queue is full
        ...

A task of a `fanout` has a deadline of its own, which pauses too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_thread = threading.local()


class Deadline:
    """On the monotonic clock. One thread works towards it; others may read it.

    renewed_s: time spent before `renew`.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.renewed_s = 0.0
        self._end = time.monotonic() + timeout_s
        self._paused_at: float | None = None

    def left(self) -> float:
        now = self._paused_at or time.monotonic()
        return max(0.0, self._end - now)

    def spent(self) -> float:
        return self.renewed_s + self.timeout_s - self.left()

    def renew(self) -> None:
        """Restores the full time, and extends the deadline of this thread's task likewise."""
        spent = self.timeout_s - self.left()
        self.renewed_s += spent
        self._end += spent
        allow_more(spent)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here does not count, nor for this thread's task."""
        stopped = [each for each in (self, getattr(_thread, "work", None)) if each and each._paused_at is None]
        for each in stopped:
            each._paused_at = time.monotonic()
        try:
            yield
        finally:
            for each in stopped:
                each._resume()

    def _resume(self) -> None:
        began, now = self._paused_at, time.monotonic()
        self._end += now - (began or now)
        self._paused_at = None


def allow_more(seconds: float) -> None:
    """Extends the deadline of this thread's task."""
    work = getattr(_thread, "work", None)
    if work:
        work._end += seconds


@contextlib.contextmanager
def at_work(deadline: Deadline) -> Iterator[None]:
    _thread.work = deadline
    try:
        yield
    finally:
        _thread.work = None
