"""Checks that a process survives the end of its SSH connection, as a job's supervisor has to.

    began = start()            # in one connection: a process that sleeps
    is_alive(began)            # in the next one; ends it

Request: {"began": `start`'s result}; the answer is {"alive"}, null if it came after SLEEP_S, when the process has ended
by itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

from .answer import reply
from .processes import Identity, identify

SLEEP_S = 30


def main(request: dict[str, Any]) -> None:
    reply(request, lambda request: {"alive": is_alive(request["began"])})


def start() -> list[Any] | None:
    """In a session of its own without our streams, as `prepare` starts a supervisor. None if that fails."""
    none = subprocess.DEVNULL
    try:
        child = subprocess.Popen(
            ["sleep", str(SLEEP_S)], stdin=none, stdout=none, stderr=none, cwd="/", env={}, start_new_session=True
        )
        began = list(identify(child.pid))
    except OSError:
        return None
    child.returncode = 0  # it stays: Popen must not warn that it still runs
    return began


def end(began: list[Any] | None) -> None:
    if began:
        Identity(*began).signal(signal.SIGKILL)


def is_alive(began: list[Any]) -> bool | None:
    pid, start_time, boot = began
    process = Identity(int(pid), int(start_time), str(boot))
    alive = process.is_alive()
    process.signal(signal.SIGKILL)
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_time / os.sysconf("SC_CLK_TCK")
    return alive or (None if age_s > SLEEP_S - 1 else False)
