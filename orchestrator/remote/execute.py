"""Runs one line of shell for the controller and streams its output.

Request: {"line", "limit_s", "most_bytes": limit of each output}. Progress (see `progress_stream`):

    {"stdout": BASE64} {"stderr": BASE64}          a piece of that output
    {"end": {"exit_code", "stdout_cut_bytes", "stderr_cut_bytes"}}

exit_code is 128 + n if signal n ended the command, null if the time was up. The command runs in the home folder with an
empty stdin. It and its session end when the controller leaves, its connection is dead (`answer`), or the time is up;
background processes of a command that ended by itself live on.
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

from .processes import die_with_parent, unseen_line
from .progress_stream import STDIN, ControllerLeft, ProgressStream, gone, serve

PIECE_BYTES = 1 << 16
GRACE_S = 2.0  # between TERM and KILL
LAST_OUTPUT_S = 0.5  # how long to read on if a background process keeps the outputs open
LOOK_S = 0.2
END_LOOK_S = 0.02


def main(request: dict[str, Any]) -> None:
    die_with_parent(0)  # loads what a child needs, before there are threads
    umask = os.umask(0o077)
    serve(request, lambda request, progress: Execution(request, progress, umask).run())


class Execution:
    def __init__(self, request: dict[str, Any], progress: ProgressStream, umask: int) -> None:
        self._progress = progress
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
        signal.signal(signal.SIGALRM, self._on_dead_connection)
        try:
            in_time = self._listen()
        except BaseException:
            self._end()
            raise
        code = self._child.wait() if in_time else self._end()
        exit_code = None if not in_time else code if code >= 0 else 128 - code
        return {"exit_code": exit_code, **{f"{name}_cut_bytes": count for name, count in self._cut.items()}}

    def _listen(self) -> bool:
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
                until = min(until, time.monotonic() + LAST_OUTPUT_S) if not ready else self._deadline
        return True

    def _read(self, handle: int) -> None:
        name, data = self._open[handle], os.read(handle, PIECE_BYTES)
        if not data:
            del self._open[handle]
        piece = data[: self._left[name]]
        self._left[name] -= len(piece)
        self._cut[name] += len(data) - len(piece)
        if piece:
            self._progress.send({name: base64.b64encode(piece).decode()})

    def _on_dead_connection(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        os._exit(1)

    def _end(self) -> int:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGTERM)
            until = time.monotonic() + GRACE_S
            while time.monotonic() < until:  # the shell ends at once; its children may still clean up
                self._child.poll()
                os.killpg(self._child.pid, 0)
                time.sleep(END_LOOK_S)
            os.killpg(self._child.pid, signal.SIGKILL)
        return self._child.wait()
