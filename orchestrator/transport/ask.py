"""One question to one host: send a program of `orchestrator/remote/` on standard input, get one JSON value back.

    answer = ask(host, "probe", {"peers": ["192.168.1.42"]}, timeout_s=20)

Nothing is installed for it: the modules that it needs travel with each request, behind `remote/loader.py`, which makes
them importable. The request names a random marker; the answer stands between two such markers, and a stream begins with
one, so that a shell that prints a banner spoils nothing (`noise`). What comes back is untrusted: its size is capped, it
is parsed as JSON and nothing else, and it must be an object.
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
from orchestrator.text import message, one_line
from orchestrator.transport import CommandResult, Transport, shell
from orchestrator.transport.sources import pack, shipped_sources

MAX_ANSWER_BYTES = 1 << 20
ALIKE = "does its shell print at login (`orch exec -- true` shows it), or is another version of orch in use?"
SILENT_S = 60.0
"""How long a program that reports its progress may be silent; it sends a beat every second."""
STUCK_S = 120
"""As `remote/watchdog.py` has it."""
LATE_S = 60.0
"""So long after we have stopped to wait a program may still be at work on its host."""

T = TypeVar("T")


@dataclass(frozen=True)
class ConnectedHost:
    """A host that we can ask: how to reach it and how to start Python there."""

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
    """The program's answer. Raises ConnectError when the host does not answer in time, ProbeError when its Python or
    its shell does not, and HostError with the host's own words when the program refuses.
    """
    marker = new_marker()
    stdin = _input(host, program, request, marker, blob, int(timeout_s + LATE_S))
    try:
        result = host.transport.run(_command(host, program), stdin=stdin, timeout_s=timeout_s)
    except HostError as error:
        raise (error if marker.encode() in error.said else explained(error, error.said)) from error
    answer = _parse(host, result, marker)
    if "error" in answer:
        raise HostError(host.node, message(answer["error"]), one_line(answer.get("remedy", "")))
    return answer


def understood(node: str, read: Callable[[], T]) -> T:
    """What `read` makes of a host's answer. Raises ProbeError where that has not the form that it should have."""
    try:
        return read()
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        why = one_line(f"{error.__class__.__name__}: {error}", 100)
        raise ProbeError(node, f"its answer makes no sense ({why})", ALIKE) from error


def new_marker() -> str:
    """What distinguishes a program's words from all else that a host prints."""
    return secrets.token_hex(16)


@contextmanager
def open_stream(
    host: ConnectedHost, program: str, request: Mapping[str, Any], marker: str
) -> Iterator[Iterator[bytes]]:
    """Starts a program that answers with a stream of bytes of its own form (see `remote/reader.py`), which begins with
    the marker; b"" comes at least once a second. The iterator raises as `exchange` has it.
    """
    with _started(host, program, _input(host, program, request, marker, b""), marker) as said:
        yield said


@contextmanager
def exchange(
    host: ConnectedHost, program: str, request: Mapping[str, Any], more: Iterable[bytes] = ()
) -> Iterator[Iterator[dict[str, Any]]]:
    """Starts a program that reports its progress (see `remote/talk.py`): each of its words up to its `end`, and {} at
    least once a second. more: what it is sent after the request; drawn in a thread of its own, it must not raise.

    The iterator raises ConnectError when the host falls silent or the link breaks, HostError with the host's own words
    when the program refuses, ProbeError when what it says makes no sense.
    """
    marker = new_marker()
    pieces = chain([_input(host, program, request, marker, b"")], more)
    with _started(host, program, pieces, marker) as said, closing(_words(host.node, said, marker.encode())) as words:
        yield words


@contextmanager
def _started(
    host: ConnectedHost, program: str, stdin: bytes | Iterable[bytes], marker: str
) -> Iterator[Iterator[bytes]]:
    with (
        host.transport.stream(_command(host, program), stdin=stdin) as chunks,
        closing(_said(host.node, chunks, marker.encode())) as said,
    ):
        yield said


def _said(node: str, chunks: Iterable[bytes], marker: bytes) -> Generator[bytes, None, None]:
    """The stream from its first marker on. Raises ConnectError where SILENT_S pass without a word."""
    listener, heard_at = Listener(node, marker), time.monotonic()
    try:
        for chunk in chunks:
            said = listener.take(chunk)
            heard_at = time.monotonic() if said else heard_at
            if (silent_s := time.monotonic() - heard_at) > SILENT_S:
                raise ConnectError(
                    node,
                    f"nothing received for {silent_s:.0f} s",
                    "check the network, and that the host is not overloaded",
                )
            yield said
        if not listener.has_begun:
            remedy = "check that python starts there, and that the shell's start-up files neither exec nor exit"
            raise ConnectError(node, "its program ended before it had said a word", remedy)
    except HostError as error:
        raise listener.explained(error) from error


def _words(node: str, chunks: Iterable[bytes], marker: bytes) -> Generator[dict[str, Any], None, None]:
    buffer = b""
    for chunk in chunks:
        yield {}
        said, buffer = _between(buffer + chunk, marker)
        if len(buffer) > MAX_ANSWER_BYTES:
            raise ProbeError(node, f"says more than {MAX_ANSWER_BYTES} bytes at once")
        for text in said:
            word: dict[str, Any] = understood(node, partial(_object, text))
            if "error" in word:
                raise HostError(node, message(word["error"]), one_line(word.get("remedy", "")))
            yield word
            if "end" in word:
                return
    raise ConnectError(node, "its program ended without a last word", "try again")


def _between(data: bytes, marker: bytes) -> tuple[list[bytes], bytes]:
    """What stands whole between two markers, and the rest that may be the beginning of more."""
    *parts, tail = data.split(marker)
    return parts[1::2], marker + tail if len(parts) % 2 else tail[-len(marker) :]


def _object(text: bytes) -> dict[str, Any]:
    return dict(json.loads(text))


def words_of(words: Any) -> list[str]:
    """A list of a host's words, each fit for a terminal."""
    if not isinstance(words, list):
        raise ValueError("not a list")
    return [one_line(word) for word in words]


def _command(host: ConnectedHost, program: str) -> str:
    return shell.python_on_stdin(host.python, f"orch-{program}", activates=bool(host.activate))


def _input(
    host: ConnectedHost, program: str, request: Mapping[str, Any], marker: str, blob: bytes, limit_s: int = STUCK_S
) -> bytes:
    """limit_s: then it ends itself on the host, whoever still waits; one that speaks winds it up again."""
    loader = resources.files("orchestrator.remote").joinpath("loader.py").read_bytes()
    package = pack(program, shipped_sources())
    shipped = {"program": program, "limit_s": limit_s, "sources": package.sizes, "bytes": len(package.content)}
    line = json.dumps({**request, "marker": marker}).encode()
    activate = f"{host.activate}\n".encode() if host.activate else b""
    start = b"%s%d\n%s%s\n%s\n" % (activate, len(loader), loader, json.dumps(shipped).encode(), line)
    return start + package.content + blob


def _parse(host: ConnectedHost, result: CommandResult, marker: str) -> dict[str, Any]:
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

# What a shell or a Python that may not start prints, and what that means: (what is wrong, what to try).
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


# What a host's shell prints around our program's words: skipped up to a size, and named where it drowns them. Pure.
#
#     listener = Listener("v100", marker)
#     said = listener.take(chunk)             # from the first marker on; b"" until then
#
# A greeting in `.bashrc`, or a ForceCommand that prints before it runs what it was asked to, shares standard output
# with
# the program. Every program begins with the marker of its request, so that what comes before is recognised and dropped.

MAX_NOISE_BYTES = 1 << 20
"""Skipped before the first word, and again between two words; whoever prints more does not end."""
REMEDY = "make its start-up files (.bashrc, .profile) and a ForceCommand silent for non-interactive logins"


class Listener:
    """Waits for the first marker of one stream."""

    def __init__(self, node: str, marker: bytes) -> None:
        self._node, self._marker = node, marker
        self._before = bytearray()
        self.has_begun = False

    def take(self, chunk: bytes) -> bytes:
        """What of the stream has come that is the program's. Raises ProbeError for noise that does not end."""
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
        """The same error, with what the shell printed where the program did not come to speak."""
        return error if self.has_begun else explained(error, self._before)


def endless(node: str, said: bytes | bytearray) -> ProbeError:
    return ProbeError(node, f"its shell prints at login without an end ({_first_line(said)})", REMEDY)


def explained(error: HostError, said: bytes | bytearray) -> HostError:
    """An error of a host whose program was not heard, with what was heard in its place."""
    line = _first_line(said)
    if not line:
        return error
    words = error.message.removeprefix(f"{error.node}: ")
    kind = ConnectError if isinstance(error, ConnectError) else ProbeError
    return kind(error.node, f"{words}; its shell prints at login ({line}), and our program was not heard", REMEDY)


def _first_line(said: bytes | bytearray) -> str:
    """The first line that is not empty, in quotes; "" where there is none."""
    lines = bytes(said[:4096]).decode(errors="replace").strip().splitlines()
    return repr(one_line(lines[0], 80)) if lines else ""
