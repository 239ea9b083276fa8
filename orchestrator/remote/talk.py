"""A program that takes its time and reports its progress: JSON objects, each between two markers, then its last word.

    serve(request, lambda request, talk: {"folder": ...})     # ... {"beat": 1} ... {"end": {"folder": ...}}

What the host refuses is reported as {"error", "remedy"}. A beat every second says that this end lives. That the
controller has left shows here as a closed standard input (`gone`), or an output that nobody reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import answer
from .answer import Refused
from .watchdog import wind

BEAT_S = 1.0
MENTION_S = 0.25
LOCK_S = 0.2
STDIN = 0


class Talk:
    """The way to the controller; several threads may speak."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._lock = threading.Lock()
        self._mentioned_at = 0.0

    def say(self, word: dict[str, Any]) -> None:
        """Raises BrokenPipeError where nobody listens."""
        line = f"{self._marker}{json.dumps(word)}{self._marker}\n"
        with self._lock:
            wind()
            sys.stdout.write(line)
            sys.stdout.flush()

    def mention(self, word: dict[str, Any]) -> None:
        """Reports what may also be left out: at most a few words a second."""
        if time.monotonic() > self._mentioned_at + MENTION_S:
            self._mentioned_at = time.monotonic()
            self.say(word)

    def beat(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.say({"beat": 1})
                time.sleep(BEAT_S)


class ControllerLeft(Exception):
    """The controller has left: nobody reads what we report."""


def serve(request: dict[str, Any], action: Callable[[dict[str, Any], Talk], dict[str, Any]]) -> None:
    os.umask(0o077)
    talk = Talk(request["marker"])
    threading.Thread(target=talk.beat, daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ControllerLeft):
        talk.say(_outcome(request, action, talk))
    # Neither waits for threads nor flushes to a reader that has left.
    os._exit(0)


def _outcome(
    request: dict[str, Any], action: Callable[[dict[str, Any], Talk], dict[str, Any]], talk: Talk
) -> dict[str, Any]:
    try:
        return {"end": action(request, talk)}
    except Refused as refusal:
        return {"error": refusal.args[0], "remedy": refusal.args[1]}
    except BrokenPipeError:
        raise
    except OSError as error:
        return {"error": answer.words(error), "remedy": answer.remedy(error, elsewhere="choose another folder")}
    except ValueError as error:
        return {"error": str(error), "remedy": ""}


def gone(timeout_s: float) -> bool:
    """Whether the controller closes our input within this time. It sends nothing while this is asked."""
    ready, _, _ = select.select([STDIN], [], [], timeout_s)
    return bool(ready) and not os.read(STDIN, 1)


@contextlib.contextmanager
def alone_at(lock: Path | str, talk: Talk, dir_fd: int | None = None) -> Iterator[None]:
    """Holds this lock file; waits, and says so, while another program has it: here, or where this disk is shared."""
    handle = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        while not try_lock(handle):
            talk.mention({"waits": 1})
            if gone(LOCK_S):
                raise ControllerLeft
        yield
    finally:
        os.close(handle)


def try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
