"""Sends a program of `orchestrator/remote/` to a host on standard input, and gets one JSON object or a stream back.

    answer = ask(host, "probe", {"peers": ["192.168.1.42"]}, timeout_s=20)

The modules it needs are sent with each request, after `remote/loader.py`. A random marker in the request surrounds the
answer and begins a stream, so that output of the shell does no harm. Answers are untrusted: limited in size, and parsed
only as a JSON object.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import chain
from typing import Any, TypeVar

from orchestrator.errors import ConnectError, HostError, ProbeError
from orchestrator.transport import CommandResult, Transport, shell
from orchestrator.transport.sources import pack, shipped_sources
from orchestrator.units import message, one_line

MAX_ANSWER_BYTES = 1 << 20
ALIKE = "does its shell print at login (`orch exec -- true` shows it), or is another version of orch in use?"
SILENT_S = 60.0  # longest silence of a program that reports progress; it sends a beat every second
STUCK_S = 120  # as in `remote/answer.py`
LATE_S = 60.0  # time that a program may run on after we have stopped waiting

T = TypeVar("T")


@dataclass(frozen=True)
class ConnectedHost:
    transport: Transport
    python: str
    activate: str | None
    workdir: str

    @property
    def node(self) -> str:
        return self.transport.node


def ask(
    host: ConnectedHost, program: str, request: Mapping[str, Any], *, blob: bytes = b"", timeout_s: float
) -> dict[str, Any]:
    """The program's answer. Raises ConnectError without an answer in time, ProbeError if its Python or shell fails,
    HostError with the host's own message if the program refuses.
    """
    marker = new_marker()
    stdin = program_input(host, program, request, marker, blob, int(timeout_s + LATE_S))
    try:
        result = host.transport.run(_command(host, program), stdin=stdin, timeout_s=timeout_s)
    except HostError as error:
        raise (error if marker.encode() in error.said else explained(error, error.said)) from error
    answer = parse_answer(host, result, marker)
    if "error" in answer:
        raise HostError(host.node, message(answer["error"]), one_line(answer.get("remedy", "")))
    return answer


def understood(node: str, read: Callable[[], T]) -> T:
    """The result of `read` on a host's answer. Raises ProbeError if the answer is malformed."""
    try:
        return read()
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        why = one_line(f"{error.__class__.__name__}: {error}", 100)
        raise ProbeError(node, f"its answer makes no sense ({why})", ALIKE) from error


def new_marker() -> str:
    return secrets.token_hex(16)


@contextmanager
def open_stream(
    host: ConnectedHost, program: str, request: Mapping[str, Any], marker: str
) -> Iterator[Iterator[bytes]]:
    """Starts a program with a byte stream of its own format (`remote/reader.py`), from its marker on; b"" comes at
    least once a second. The iterator raises like `exchange`.
    """
    with _started(host, program, program_input(host, program, request, marker, b""), marker) as said:
        yield said


@contextmanager
def exchange(
    host: ConnectedHost, program: str, request: Mapping[str, Any], more: Iterable[bytes] = ()
) -> Iterator[Iterator[dict[str, Any]]]:
    """Starts a program that reports progress (`remote/progress_stream.py`): its messages up to `end`, and {} at least
    once a second. more: sent after the request; drawn in a thread of its own, it must not raise.

    The iterator raises ConnectError if the host is silent or the connection breaks, HostError with the host's own
    message if the program refuses, ProbeError for malformed messages.
    """
    marker = new_marker()
    pieces = chain([program_input(host, program, request, marker, b"")], more)
    with _started(host, program, pieces, marker) as said, closing(_messages(host.node, said, marker.encode())) as words:
        yield words


@contextmanager
def _started(
    host: ConnectedHost, program: str, stdin: bytes | Iterable[bytes], marker: str
) -> Iterator[Iterator[bytes]]:
    with (
        host.transport.stream(_command(host, program), stdin=stdin) as chunks,
        closing(program_output(host.node, chunks, marker.encode())) as said,
    ):
        yield said


def program_output(node: str, chunks: Iterable[bytes], marker: bytes) -> Generator[bytes, None, None]:
    filter_, received_at = MarkerFilter(node, marker), time.monotonic()
    try:
        for chunk in chunks:
            said = filter_.take(chunk)
            received_at = time.monotonic() if said else received_at
            if (silent_s := time.monotonic() - received_at) > SILENT_S:
                raise ConnectError(
                    node,
                    f"nothing received for {silent_s:.0f} s",
                    "check the network, and that the host is not overloaded",
                )
            yield said
        if not filter_.has_begun:
            remedy = "check that python starts there, and that the shell's start-up files neither exec nor exit"
            raise ConnectError(node, "its program ended before its first output", remedy)
    except HostError as error:
        raise filter_.explained(error) from error


def _messages(node: str, chunks: Iterable[bytes], marker: bytes) -> Generator[dict[str, Any], None, None]:
    buffer = b""
    for chunk in chunks:
        yield {}
        said, buffer = _between(buffer + chunk, marker)
        if len(buffer) > MAX_ANSWER_BYTES:
            raise ProbeError(node, f"sent more than {MAX_ANSWER_BYTES} bytes at once")
        for text in said:
            word: dict[str, Any] = understood(node, partial(_object, text))
            if "error" in word:
                raise HostError(node, message(word["error"]), one_line(word.get("remedy", "")))
            yield word
            if "end" in word:
                return
    raise ConnectError(node, "its program ended without a final message", "try again")


def _between(data: bytes, marker: bytes) -> tuple[list[bytes], bytes]:
    *parts, tail = data.split(marker)
    return parts[1::2], marker + tail if len(parts) % 2 else tail[-len(marker) :]


def _object(text: bytes) -> dict[str, Any]:
    return dict(json.loads(text))


def words_of(words: Any) -> list[str]:
    """A list of a host's texts, each safe for a terminal."""
    if not isinstance(words, list):
        raise ValueError("not a list")
    return [one_line(word) for word in words]


def _command(host: ConnectedHost, program: str) -> str:
    return shell.python_on_stdin(host.python, f"orch-{program}", activates=bool(host.activate))


def program_input(
    host: ConnectedHost, program: str, request: Mapping[str, Any], marker: str, blob: bytes, limit_s: int = STUCK_S
) -> bytes:
    # limit_s: the program ends itself then, unless its messages extend the time (`remote/answer.py`).
    loader = resources.files("orchestrator.remote").joinpath("loader.py").read_bytes()
    package = pack(program, shipped_sources())
    shipped = {"program": program, "limit_s": limit_s, "sources": package.sizes, "bytes": len(package.content)}
    line = json.dumps({**request, "marker": marker}).encode()
    activate = f"{host.activate}\n".encode() if host.activate else b""
    start = b"%s%d\n%s%s\n%s\n" % (activate, len(loader), loader, json.dumps(shipped).encode(), line)
    return start + package.content + blob


def parse_answer(host: ConnectedHost, result: CommandResult, marker: str) -> dict[str, Any]:
    parts = result.stdout.split(marker.encode())
    if len(parts) != 3:
        raise _no_answer(host, result)
    if len(parts[1]) > MAX_ANSWER_BYTES:
        raise ProbeError(host.node, f"answered {len(parts[1])} bytes, more than {MAX_ANSWER_BYTES}", ALIKE)
    try:
        answer = json.loads(parts[1])
    except (ValueError, RecursionError) as error:
        raise ProbeError(host.node, f"its answer is not JSON ({error.__class__.__name__})", ALIKE) from error
    if not isinstance(answer, dict):
        raise ProbeError(host.node, "its answer is not a JSON object", ALIKE)
    return answer


START_UP_FILES = "check that this host's shell start-up files neither exec nor exit"

# Output of a shell or Python that cannot start: (what is wrong, what to try).
_REFUSED = {
    sign: (
        "its user may start no further process or thread there",
        "end some of this user's processes on that host, or raise `ulimit -u` (or its cgroup's pids.max)",
    )
    for sign in (b"Resource temporarily unavailable", b"can't start new thread", b"fork: retry", b"Cannot fork")
} | {
    b"Cannot allocate memory": ("too little memory is free there", "end something on that host that takes memory"),
    b"MemoryError": ("its user may take too little memory there", "raise `ulimit -v`, or free memory on that host"),
    b"Input/output error": ("its disk fails", "look at `dmesg` on that host"),
    b"Stale file handle": ("its network disk fails", "look at `dmesg` and the mounts on that host"),
}


def _no_answer(host: ConnectedHost, result: CommandResult) -> ProbeError:
    failed = shell.ACTIVATE_FAILED.encode()
    if host.activate and failed in result.stderr:
        said = one_line(_last_line(result.stderr.partition(failed)[0])) or f"exit {result.exit_code}"
        return ProbeError(host.node, f"its `activate` failed ({said})", _activate_remedy(host.node, host.activate))
    said = one_line(_last_line(result.stderr) or _last_line(result.stdout))
    if b"fish:" in result.stderr:
        return ProbeError(host.node, f"its shell start-up files start another shell, fish ({said})", START_UP_FILES)
    if result.exit_code in (126, 127):
        return ProbeError(
            host.node,
            f"python {host.python!r} does not start ({said or 'not found'})",
            f"set `python:` (or `activate:`) for {host.node} to a Python 3.10 or newer on that host"
            if "/venv/torch-" not in host.python
            else "`orch setup` rebuilds this environment",
        )
    if refused := next((words for sign, words in _REFUSED.items() if sign in result.stderr), None):
        what, remedy = refused
        return ProbeError(host.node, f"{what} ({said})" if said else what, remedy)
    return ProbeError(
        host.node,
        f"no answer from {host.python!r} (exit {result.exit_code}{': ' + said if said else ''})",
        f"{START_UP_FILES}, and that python is 3.10 or newer",
    )


def _activate_remedy(node: str, activate: str) -> str:
    if "conda" in activate:
        return "write `activate: . ~/miniconda3/etc/profile.d/conda.sh && conda activate NAME`, with conda's own folder"
    if re.match(r"\s*source\b", activate):
        return "it runs in sh, which has no `source`: write `activate: . FILE`"
    return f"correct `activate:` of {node}: it is a line of POSIX shell, like `. ~/venv/bin/activate`"


def _last_line(output: bytes) -> str:
    lines = output[-4096:].decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


MAX_NOISE_BYTES = 1 << 20  # limit before the first message and between two messages; more output counts as endless
REMEDY = "make its start-up files (.bashrc, .profile) and a ForceCommand silent for non-interactive logins"


class MarkerFilter:
    """Skips a shell's output up to the first marker of one stream.

    Such output comes from `.bashrc` or a ForceCommand.
    """

    def __init__(self, node: str, marker: bytes) -> None:
        self._node, self._marker = node, marker
        self._before = bytearray()
        self.has_begun = False

    def take(self, chunk: bytes) -> bytes:
        """The program's part of the chunk. Raises ProbeError for endless other output."""
        if self.has_begun or not chunk:
            return chunk
        known = max(0, len(self._before) - len(self._marker))
        self._before += chunk
        at = self._before.find(self._marker, known)
        if at < 0:
            if len(self._before) > MAX_NOISE_BYTES:
                raise endless(self._node, self._before)
            return b""
        self.has_begun = True
        said = bytes(self._before[at:])
        del self._before[at:]
        return said

    def explained(self, error: HostError) -> HostError:
        """Adds the shell's output if the program has not begun."""
        return error if self.has_begun else explained(error, self._before)


def endless(node: str, said: bytes | bytearray) -> ProbeError:
    return ProbeError(node, f"its shell prints at login without an end ({_first_line(said)})", REMEDY)


def explained(error: HostError, said: bytes | bytearray) -> HostError:
    """Adds the shell's output to an error of a host whose program gave none."""
    line = _first_line(said)
    if not line:
        return error
    words = error.message.removeprefix(f"{error.node}: ")
    kind = ConnectError if isinstance(error, ConnectError) else ProbeError
    return kind(error.node, f"{words}; its shell prints at login ({line}), and our program gave no output", REMEDY)


def _first_line(said: bytes | bytearray) -> str:
    lines = bytes(said[:4096]).decode(errors="replace").strip().splitlines()
    return repr(one_line(lines[0], 80)) if lines else ""
