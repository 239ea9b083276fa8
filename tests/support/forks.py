"""Processes forked where all that they import is there already: a start of torch takes seconds of the processor, one of
`orch` most of a second, and a fork hundredths.

    done = run(ORCH, ["status"], env={...}, cwd=folder)                  # as subprocess.run, with its output as text
    with start(TRAINER, ["--exp", "mnist_lenet"], env={...}) as rank:    # as subprocess.Popen, with pipes as text
        rank.send_signal(signal.SIGTERM)

Each is a process of its own, with its own folder, environment, streams and network. `forks_server.py` is where they
come from: one for each kind and test run, started when it is first needed. Those of programs that need torch are forked
themselves, from the process that multiprocessing forks ranks from: torch is imported once for all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.forks_server import be_server

SERVER = Path(__file__).with_name("forks_server.py")
ORCH, TRAINER, TORCHRUN, CRASH = "orch", "trainer", "torchrun", "crash"


class Forked:
    """One of them, as subprocess.Popen has it."""

    def __init__(
        self,
        kind: str,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        input_: str = "",
        network: Path | None = None,
        session: bool = False,
    ) -> None:
        """env, cwd: ours where not given. network: a namespace to be in. session: whether it begins one of its own.
        Standard input ends after `input_`.
        """
        self.args, self.returncode = list(words), None
        ends = [os.pipe() for _ in range(4)]
        place = {"env": dict(os.environ if env is None else env), "cwd": str(cwd or os.getcwd())}
        request = {"words": self.args, "network": network and str(network), "session": session, **place}
        theirs = [ends[0][0], *(write for _, write in ends[1:])]
        try:
            self.pid = _server(kind).fork(request, theirs)
        finally:
            for handle in theirs:
                os.close(handle)
        with os.fdopen(ends[0][1], "w") as stdin, contextlib.suppress(BrokenPipeError):
            stdin.write(input_)
        self.stdout, self.stderr = (os.fdopen(read, encoding="utf-8", errors="replace") for read, _ in ends[1:3])
        self._ended = ends[3][0]

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.stdout.close()
        self.stderr.close()

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is still unread of its output, once it has ended."""
        said: dict[int, str] = {}

        def read(number: int, stream: IO[str]) -> None:
            said[number] = stream.read()

        readers = [threading.Thread(target=read, args=pair) for pair in enumerate((self.stdout, self.stderr))]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return said[0], said[1]

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            self.returncode = int(os.read(self._ended, 16) or -signal.SIGKILL)
            os.close(self._ended)
        return self.returncode


def start(kind: str, words: Sequence[str], **options: Any) -> Forked:
    return Forked(kind, words, **options)


def run(kind: str, words: Sequence[str], *, timeout: float = 240, **options: Any) -> subprocess.CompletedProcess[str]:
    """Ends it when it takes longer than `timeout` seconds, and raises subprocess.TimeoutExpired; and with any exception
    of ours.
    """
    with Forked(kind, words, **options) as process:
        try:
            said = process.communicate(timeout)
        except BaseException:  # a Ctrl-C, or an end from outside, too
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.wait(), *said)


class _Server:
    def __init__(self, kind: str) -> None:
        self._asking = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with theirs:
            self._wait = _fresh(kind, theirs) if kind == ORCH else _forked(kind, theirs)
        self._owner = os.getpid()
        atexit.register(self.end)

    def fork(self, request: Mapping[str, Any], handles: Sequence[int]) -> int:
        with self._asking:
            socket.send_fds(self._socket, [json.dumps(request).encode()], handles)
            answer = self._socket.recv(32)
        assert answer, "the fork server has ended"
        return int(answer)

    def end(self) -> None:
        atexit.unregister(self.end)
        if os.getpid() != self._owner:  # what was forked from us does not end what is ours
            return
        # Closing alone is not enough: a process that was forked from ours holds this end too, and may outlive us.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._wait()


def _fresh(kind: str, requests: socket.socket) -> Callable[[], object]:
    """How to wait for its end."""
    words = [sys.executable, str(SERVER), kind, str(requests.fileno())]
    return subprocess.Popen(words, pass_fds=[requests.fileno()]).wait


def _forked(kind: str, requests: socket.socket) -> Callable[[], object]:
    process = multiprocessing.get_context("forkserver").Process(target=be_server, args=(kind, requests))
    process.start()
    return process.join


@functools.cache
def _server(kind: str) -> _Server:
    return _Server(kind)
