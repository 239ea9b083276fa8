"""Builds shell commands, and runs them on this machine (`LocalTransport`). No other module puts values into shell text.

User data is sent on standard input, and everything in a shell line is quoted here. The bootstrap has no quote,
backslash, `!` or `$`, so that sh, dash, bash, zsh, fish and tcsh read it alike.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

from orchestrator.errors import ConnectError, HostError, ProbeError
from orchestrator.transport import MAX_OUTPUT_BYTES, CommandResult

ARRIVE_S = 300  # time for a program to arrive completely; then its connection is dead and it ends
ACTIVATE_FAILED = "orch-activate-failed"  # printed on standard error if the line before Python fails or ends the shell
# Command lines are visible to all users of a host, so the `activate` line is read from standard input.
_ACTIVATE = (
    f'IFS= read -r ORCH_LINE && trap "echo {ACTIVATE_FAILED} >&2" EXIT && '
    'eval "unset ORCH_LINE; $ORCH_LINE" </dev/null && trap - EXIT && '
)
_FLAGS = "-Suc"  # -S skips site-packages, which our programs do not need: half of the start time
# Reads "<length>\n<that many bytes of Python>" from standard input and runs it; the rest is its request. The current
# folder is no place for modules: a person's json.py may be there.
_BOOTSTRAP = (
    "import sys;sys.path=[p for p in sys.path if p];import signal;signal.alarm(%d);"
    "i=sys.stdin.buffer;exec(compile(i.read(int(i.readline())),sys.argv[1],sys.argv[2]))"
)


def join(argv: Sequence[str]) -> str:
    return shlex.join(argv)


def typed(argv: Sequence[str]) -> str:
    """Like `join`, as a person would type it: a leading `~/` remains the home folder."""
    return " ".join(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word) for word in argv)


def python_on_stdin(python: str, program: str, *, activates: bool = False) -> str:
    """A shell line that starts `python` on a program from standard input.

    python: a path or name, may begin with `~/`. program: a name for tracebacks and `ps`. activates: standard input
    begins with a line of POSIX shell to run first (the inventory's `activate`); POSIX's `read` takes exactly that line.
    """
    home, _, rest = python.partition("/")
    interpreter = f'"$HOME"/{shlex.quote(rest)}' if home == "~" and rest else shlex.quote(python)
    line = f"exec {interpreter} {_FLAGS} {shlex.quote(_BOOTSTRAP % ARRIVE_S)} {shlex.quote(program)} exec"
    line = _ACTIVATE + line if activates else line
    return line if not activates and home != "~" else f"exec sh -c {shlex.quote(line)}"


_TICK_S = 1.0
_MAX_PIECE_BYTES = 1 << 20
_GRACE_S = 1.0

# Variables set by a login, and variables that select devices and libraries. Others are dropped: a RANK or MASTER_ADDR
# of another job would disturb ours.
_KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")


class LocalTransport:
    """This machine as a host, for jobs without a cluster or on the controller itself. Raises ConnectError after a
    deadline.

        LocalTransport("here").run("nvidia-smi -L", timeout_s=20).stdout

    Like SSH it runs `sh -c` in the home folder, in a session of its own, with a login's few environment variables.
    Ending a command ends its process group; other sessions (a job's supervisor) live on.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self.login_s, self.logins_tried = 0.0, 1

    @property
    def node(self) -> str:
        return self._node

    def run(self, command: str, *, stdin: bytes = b"", timeout_s: float) -> CommandResult:
        end = time.monotonic() + timeout_s
        output: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        size = 0
        try:
            with _started(command, stdin, hold_stdin=False) as process:
                for name, data in self._pieces(process, lambda: end - time.monotonic()):
                    output[name].append(data)
                    size += len(data)
                    if size > MAX_OUTPUT_BYTES:
                        raise ProbeError(self.node, f"its answer is longer than {MAX_OUTPUT_BYTES} bytes")
                try:
                    code = process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired as error:
                    raise self._late() from error
        except HostError as error:
            error.said = b"".join(output["stdout"])
            raise
        return CommandResult(code if code >= 0 else 128 - code, b"".join(output["stdout"]), b"".join(output["stderr"]))

    @contextlib.contextmanager
    def stream(self, command: str, *, stdin: bytes | Iterable[bytes] = b"") -> Iterator[Iterator[bytes]]:
        with _started(command, stdin, hold_stdin=True) as process:
            pieces = self._pieces(process, lambda: float("inf"))
            with contextlib.closing(_stdout_of(pieces)) as chunks:
                yield chunks

    def close(self) -> None:
        """No connection is kept between commands."""

    def _pieces(
        self, process: subprocess.Popen[bytes], left: Callable[[], float]
    ) -> Generator[tuple[str, bytes], None, None]:
        """(stream, bytes) until both outputs have ended; ("stdout", b"") once a second without output."""
        assert process.stdout and process.stderr  # noqa: S101 - for the type checker: both are pipes
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, "stdout")
            selector.register(process.stderr, selectors.EVENT_READ, "stderr")
            while selector.get_map():
                if left() <= 0:
                    raise self._late()
                ready = selector.select(min(_TICK_S, left()))
                for key, _ in ready:
                    data = os.read(key.fd, _MAX_PIECE_BYTES)
                    if data:
                        yield key.data, data
                    else:
                        selector.unregister(key.fileobj)
                if not ready:
                    yield "stdout", b""

    def _late(self) -> ConnectError:
        return ConnectError(self.node, "the command did not end in time", "look at what this machine is busy with")


def _stdout_of(pieces: Iterator[tuple[str, bytes]]) -> Generator[bytes, None, None]:
    for name, data in pieces:
        yield data if name == "stdout" else b""


@contextlib.contextmanager
def _started(command: str, stdin: bytes | Iterable[bytes], *, hold_stdin: bool) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        ["sh", "-c", command],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        cwd=_home(),
        env=_environment(),
        start_new_session=True,
    )
    left = threading.Event()
    writer = threading.Thread(target=_feed, args=(process, stdin, left if hold_stdin else None), daemon=True)
    writer.start()
    try:
        yield process
        if hold_stdin:
            _end(process, left, grace_s=_GRACE_S)
    except BaseException:
        _end(process, left, grace_s=0)
        raise
    finally:
        for output in (process.stdout, process.stderr):
            if output:
                output.close()
        writer.join(_GRACE_S)  # longer only if a process that outlives the command holds its standard input


def _feed(process: subprocess.Popen[bytes], stdin: bytes | Iterable[bytes], left: threading.Event | None) -> None:
    assert process.stdin  # noqa: S101 - for the type checker: it is a pipe
    with contextlib.suppress(BrokenPipeError), process.stdin:  # a command need not read its input
        for piece in [stdin] if isinstance(stdin, bytes) else stdin:
            process.stdin.write(piece)
            process.stdin.flush()
        if left:
            left.wait()


def _end(process: subprocess.Popen[bytes], left: threading.Event, *, grace_s: float) -> None:
    left.set()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _home() -> str:
    home = os.path.expanduser("~")
    return home if Path(home).is_dir() else "/"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("LC_")}
