"""Progress messages of long-running programs to the controller: JSON objects between markers, the last one final.

    serve(request, lambda request, progress: {"folder": ...})     # ... {"beat": 1} ... {"end": {"folder": ...}}

A refusal is reported as {"error", "remedy"}. A beat each second shows that this end is alive. A controller that has
left shows as a closed standard input (`gone`) or a broken pipe.
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
from .answer import Refused, wind

BEAT_S = 1.0
MENTION_S = 0.25
LOCK_S = 0.2
STDIN = 0


class ProgressStream:
    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._lock = threading.Lock()
        self._mentioned_at = 0.0

    def send(self, word: dict[str, Any]) -> None:
        line = f"{self._marker}{json.dumps(word)}{self._marker}\n"
        with self._lock:
            wind()
            sys.stdout.write(line)
            sys.stdout.flush()

    def mention(self, word: dict[str, Any]) -> None:
        if time.monotonic() > self._mentioned_at + MENTION_S:
            self._mentioned_at = time.monotonic()
            self.send(word)

    def beat(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.send({"beat": 1})
                time.sleep(BEAT_S)


class ControllerLeft(Exception):
    """Output has no reader any more."""


def serve(request: dict[str, Any], action: Callable[[dict[str, Any], ProgressStream], dict[str, Any]]) -> None:
    os.umask(0o077)
    progress = ProgressStream(request["marker"])
    threading.Thread(target=progress.beat, daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ControllerLeft):
        progress.send(_outcome(request, action, progress))
    # Neither waits for threads nor flushes to a reader that has left.
    os._exit(0)


def _outcome(
    request: dict[str, Any],
    action: Callable[[dict[str, Any], ProgressStream], dict[str, Any]],
    progress: ProgressStream,
) -> dict[str, Any]:
    try:
        return {"end": action(request, progress)}
    except Refused as refusal:
        return {"error": refusal.args[0], "remedy": refusal.args[1]}
    except BrokenPipeError:
        raise
    except OSError as error:
        return {"error": answer.words(error), "remedy": answer.remedy(error, elsewhere="choose another folder")}
    except ValueError as error:
        return {"error": str(error), "remedy": ""}


def gone(timeout_s: float) -> bool:
    """The controller closes our input within this time. It must not send anything meanwhile."""
    ready, _, _ = select.select([STDIN], [], [], timeout_s)
    return bool(ready) and not os.read(STDIN, 1)


@contextlib.contextmanager
def alone_at(lock: Path | str, progress: ProgressStream, dir_fd: int | None = None) -> Iterator[None]:
    """Holds this lock file; waits and reports it while a program, also on another host with this disk, holds it."""
    handle = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        while not try_lock(handle):
            progress.mention({"waits": 1})
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
