"""Every error that a user may see, and its exit code.

    OrchError                 1   an operation failed
    ├── StateError            1   a record in $ORCH_HOME is damaged
    ├── UsageError            2   wrong usage or a bad input file
    │   ├── InventoryError    2   all mistakes of an inventory file
    │   └── NoJobError        2   no job matches
    ├── HostError             3   one host is unusable or unreachable
    │   ├── ConnectError          no TCP connection, no SSH banner, a time-out, a broken connection
    │   │   └── LateError         a connection or login took too long
    │   ├── HostKeyError          the host's key is unknown or has changed
    │   ├── AuthError             the host refused our user or key
    │   └── ProbeError            the host's answer is unusable
    ├── HostsError            3   several hosts' errors
    │   └── RefusedError          hosts refused a job; nothing has run
    ├── TooFewError           3   fewer hosts can take part than `--hosts` needs
    └── UnlikeError           3   usable hosts that cannot train together

This file imports nothing else of the project.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class OrchError(Exception):
    """message: what is wrong and where. remedy: what to try."""

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}: {self.remedy}" if self.remedy else self.message


class StateError(OrchError):
    pass


class UsageError(OrchError):
    exit_code = 2


class NoJobError(UsageError):
    pass


@dataclass(frozen=True)
class Mistake:
    """line: from 1; 0 if unknown."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


class InventoryError(UsageError):
    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__("\n".join(str(mistake) for mistake in mistakes))
        self.mistakes = tuple(mistakes)


class HostError(OrchError):
    """node: its name in the inventory."""

    exit_code = 3
    at: str = ""
    """The host's address or name, if the message has it."""
    said: bytes = b""
    """Output of a command that did not finish."""

    def __init__(self, node: str, message: str, remedy: str = "") -> None:
        super().__init__(f"{node}: {message}", remedy)
        self.node = node


class ConnectError(HostError):
    pass


class LateError(ConnectError):
    """A connection or login took too long."""


class HostKeyError(HostError):
    pass


class AuthError(HostError):
    pass


class ProbeError(HostError):
    def __init__(self, node: str, message: str, remedy: str = "") -> None:
        super().__init__(node, message, remedy or "try again")


class HostsError(OrchError):
    exit_code = 3

    def __init__(self, errors: Sequence[HostError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = tuple(errors)


class RefusedError(HostsError):
    pass


class TooFewError(OrchError):
    exit_code = 3


class UnlikeError(OrchError):
    exit_code = 3
