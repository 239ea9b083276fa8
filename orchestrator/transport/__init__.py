"""How a host is reached: one interface, `Transport`, with two implementations (`ssh`, `shell`).

A transport runs one shell command on one host. Everything else is done by Python programs of ours, sent on standard
input (`ask.py`), so that nothing has to be installed there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trainer.shared.doors import door

MAX_OUTPUT_BYTES = 16 << 20


@dataclass(frozen=True)
class CommandResult:
    """exit_code is 128 + n if signal n ended the command."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Transport(Protocol):
    """A connection to one host. All methods raise ConnectError when the host is gone or the deadline passes.

    Threads may share it: each command gets its own channel.
    """

    login_s: float  # duration of the last login, without our own queues
    logins_tried: int  # attempts for that login

    @property
    def node(self) -> str: ...

    def run(self, command: str, *, stdin: bytes = b"", timeout_s: float) -> CommandResult:
        """Runs one line of POSIX shell until it has exited and its outputs are closed.

        Output above MAX_OUTPUT_BYTES is a ProbeError. An error carries the standard output so far as `said`.
        """
        ...

    def stream(self, command: str, *, stdin: bytes | Iterable[bytes] = b"") -> AbstractContextManager[Iterator[bytes]]:
        """The command's standard output in chunks as they come, without a time limit; standard error is dropped.

        `stdin` is sent and then held open: its end shows the program that we left. Pieces are drawn in a thread of
        their own and must not raise. Leaving the context ends the command. The iterator ends with the command, and
        raises ConnectError if the connection breaks first. Chunks are at most 1 MiB; b"" is yielded at least once a
        second, so that the caller can check its own deadlines.
        """
        ...

    def close(self) -> None: ...


if not TYPE_CHECKING:  # a type checker looks for names in the modules themselves
    __getattr__ = door(__name__, __path__[0])
