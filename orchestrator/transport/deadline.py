"""How long a host has for what it is asked: a deadline whose clock stands still while the host is not to blame.

    deadline = Deadline(10)
    with deadline.paused():            # a person types a passphrase, or it is not this host's turn yet
        ...

Work on one host of many (see `fanout`) has a deadline of its own, and what it waits for there does not count either.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_thread = threading.local()


class Deadline:
    """A moment on the monotonic clock. One thread works towards it; others may look.

    renewed_s: what was spent before `renew`.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.renewed_s = 0.0
        self._end = time.monotonic() + timeout_s
        self._paused_at: float | None = None

    def left(self) -> float:
        """Seconds left, never below zero."""
        now = self._paused_at or time.monotonic()
        return max(0.0, self._end - now)

    def spent(self) -> float:
        """Seconds since it was made, but for pauses."""
        return self.renewed_s + self.timeout_s - self.left()

    def renew(self) -> None:
        """All of its time again, and as much more for the work that this thread is at."""
        spent = self.timeout_s - self.left()
        self.renewed_s += spent
        self._end += spent
        allow_more(spent)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in here does not count, nor does it for the work that this thread is at."""
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
    """The work that this thread is at may take so much longer."""
    work = getattr(_thread, "work", None)
    if work:
        work._end += seconds


@contextlib.contextmanager
def at_work(deadline: Deadline) -> Iterator[None]:
    """Makes it the deadline of all that this thread does in here."""
    _thread.work = deadline
    try:
        yield
    finally:
        _thread.work = None
