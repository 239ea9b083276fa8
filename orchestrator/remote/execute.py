"""Runs one line of shell for the controller, and tells what it prints while it runs.

Request: {"line", "limit_s", "most_bytes": of each of the two outputs that are told}. It reports (see `talk`):

    {"stdout": BASE64} {"stderr": BASE64}          a piece of that output
    {"end": {"exit_code", "stdout_cut_bytes", "stderr_cut_bytes"}}

exit_code is 128 + n for a command that signal n ended, and null for one that was ended when its time was up. The
command runs as in a login: in the home folder, with nothing to read. It and all of its session end when the controller
leaves, nobody hears us any more (`watchdog`), or the time is up. What it left running in the background when it ended
by itself lives on.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import signal
import subprocess
import time
from typing import Any

from .processes import die_with_parent
from .talk import STDIN, ControllerLeft, Talk, gone, serve
from .unseen_line import unseen_line

PIECE_BYTES = 1 << 16
GRACE_S = 2.0
"""Between TERM and KILL."""
LAST_WORDS_S = 0.5
"""So long we listen to what a command left running that still holds its outputs."""
LOOK_S = 0.2
END_LOOK_S = 0.02


def main(request: dict[str, Any]) -> None:
    die_with_parent(0)  # changes nothing, and loads what a child needs of it: later there are threads
    umask = os.umask(0o077)
    serve(request, lambda request, talk: Execution(request, talk, umask).run())


class Execution:
    def __init__(self, request: dict[str, Any], talk: Talk, umask: int) -> None:
        self._talk = talk
        self._deadline = time.monotonic() + request["limit_s"]
        argv, environment = unseen_line(request["line"], os.environ)
        self._child = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            umask=umask,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )
        assert self._child.stdout and self._child.stderr
        self._open = {self._child.stdout.fileno(): "stdout", self._child.stderr.fileno(): "stderr"}
        self._left = dict.fromkeys(self._open.values(), request["most_bytes"])
        self._cut = dict.fromkeys(self._open.values(), 0)

    def run(self) -> dict[str, Any]:
        signal.signal(signal.SIGALRM, self._unheard)
        try:
            in_time = self._listen()
        except BaseException:
            self._end()
            raise
        code = self._child.wait() if in_time else self._end()
        exit_code = None if not in_time else code if code >= 0 else 128 - code
        return {"exit_code": exit_code, **{f"{name}_cut_bytes": count for name, count in self._cut.items()}}

    def _listen(self) -> bool:
        """Tells what it prints until it has ended. False when its time is up. Raises ControllerLeft."""
        until = self._deadline
        while self._open or self._child.poll() is None:
            if time.monotonic() >= until:
                return self._child.returncode is not None
            ready, _, _ = select.select([*self._open, STDIN], [], [], LOOK_S)
            if STDIN in ready and gone(0):
                raise ControllerLeft
            for handle in ready:
                if handle in self._open:
                    self._read(handle)
            if self._child.poll() is not None:
                until = min(until, time.monotonic() + LAST_WORDS_S) if not ready else self._deadline
        return True

    def _read(self, handle: int) -> None:
        name, data = self._open[handle], os.read(handle, PIECE_BYTES)
        if not data:
            del self._open[handle]
        told = data[: self._left[name]]
        self._left[name] -= len(told)
        self._cut[name] += len(data) - len(told)
        if told:
            self._talk.say({name: base64.b64encode(told).decode()})

    def _unheard(self, *_: object) -> None:
        """The watchdog's alarm: what we started is to end with us."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        os._exit(1)

    def _end(self) -> int:
        """TERM to all of its session, then KILL to whatever of it is left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGTERM)
            until = time.monotonic() + GRACE_S
            while time.monotonic() < until:  # the shell itself ends at once: what it runs may still tidy up
                self._child.poll()
                os.killpg(self._child.pid, 0)
                time.sleep(END_LOOK_S)
            os.killpg(self._child.pid, signal.SIGKILL)
        return self._child.wait()
