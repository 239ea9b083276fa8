"""How a host is reached: one narrow interface with two implementations (`ssh`, `shell`).

A transport runs one shell command on one host. That is all it does: every other thing we do on a host is a
standalone Python program of ours sent on standard input (see `ask.py`), so nothing needs to be installed there
and nothing but data travels in the other direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

MAX_OUTPUT_BYTES = 16 << 20


@dataclass(frozen=True)
class CommandResult:
    """What a command left behind. exit_code is 128 + the signal's number for a command that a signal ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Transport(Protocol):
    """A way to one host. All methods raise ConnectError when the host is gone or the deadline passes.

    One transport may be used from several threads at once: each command gets its own channel.
    """

    login_s: float
    """How long the last login took, our own queues apart."""
    logins_tried: int
    """How many times its server had to be asked for that one."""

    @property
    def node(self) -> str:
        """The node's name in the inventory."""
        ...

    def run(self, command: str, *, stdin: bytes = b"", timeout_s: float) -> CommandResult:
        """Runs one line of POSIX shell to its end: until it has exited and nobody holds its outputs open.

        Output above MAX_OUTPUT_BYTES is a ProbeError, never a full memory. An error carries what
        came of standard output as `said`.
        """
        ...

    def stream(self, command: str, *, stdin: bytes | Iterable[bytes] = b"") -> AbstractContextManager[Iterator[bytes]]:
        """The command's standard output in chunks as they come, without limit of time. Its standard error is dropped.

        `stdin` is sent and then held open: its end is how a program on the host learns that we left. Given in pieces,
        it is drawn in a thread of its own, as fast as the host takes it, and must not raise. Leaving the context ends
        the command (its standard input closes, then its channel). The iterator ends with the command, and raises
        ConnectError when the link breaks first. Chunks are at most 1 MiB; b"" is yielded at least every second while
        nothing comes, so that the reader can look at its own deadlines.
        """
        ...

    def close(self) -> None: ...
