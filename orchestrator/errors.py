"""Every error that a person may see, and the exit code it ends with.

    OrchError                 1   an operation failed
    ├── StateError            1   what $ORCH_HOME holds of one job or cluster is damaged
    ├── UsageError            2   wrong usage or a bad input file
    │   ├── InventoryError    2   every mistake of an inventory file at once
    │   └── NoJobError        2   no job has the id that was asked for
    ├── HostError             3   one host is unusable or unreachable
    │   ├── ConnectError          no TCP connection, no SSH banner, a time-out, a link that broke
    │   ├── HostKeyError          the host's key is unknown, or not the one we know
    │   ├── AuthError             the host refused our user or key
    │   └── ProbeError            the host answered, but not in a way that lets it take part
    ├── HostsError            3   several hosts' errors together
    │   └── RefusedError          hosts that refuse a job, of which nothing has run anywhere
    ├── TooFewError           3   fewer hosts can take part than `--hosts` needs
    ├── UnlikeError           3   hosts that are fine by themselves and cannot train together
    └── TurnError             3   a run that waited for its GPUs was not started; 1 where somebody cancelled it

Each carries a one-line `message` and a `remedy`: what to try next. `str(error)` joins both.
This file imports nothing else of the project.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class OrchError(Exception):
    """An expected failure. message: one line, what is wrong and where; remedy: one line, what to try."""

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
    """One mistake in an input file. line counts from 1; 0 where no line can be named."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


class InventoryError(UsageError):
    """All mistakes of one inventory, so that a person mends the file once."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__("\n".join(str(mistake) for mistake in mistakes))
        self.mistakes = tuple(mistakes)


class HostError(OrchError):
    """One host cannot be used. node: its name in the inventory."""

    exit_code = 3
    at: str = ""
    """The host's address or name, where the words hold it."""
    said: bytes = b""
    """What a command printed that did not come to its end."""

    def __init__(self, node: str, message: str, remedy: str = "") -> None:
        super().__init__(f"{node}: {message}", remedy)
        self.node = node


class ConnectError(HostError):
    pass


class HostKeyError(HostError):
    pass


class AuthError(HostError):
    pass


class ProbeError(HostError):
    """What a host answers is of no use."""

    def __init__(self, node: str, message: str, remedy: str = "") -> None:
        super().__init__(node, message, remedy or "try again")


class HostsError(OrchError):
    exit_code = 3

    def __init__(self, errors: Sequence[HostError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = tuple(errors)


class RefusedError(HostsError):
    """These hosts cannot take the job, or give no answer, before any host was asked to run it."""


class TooFewError(OrchError):
    exit_code = 3


class UnlikeError(OrchError):
    exit_code = 3


class TurnError(OrchError):
    exit_code = 3

    def __init__(self, message: str, remedy: str = "", *, exit_code: int = 3) -> None:
        super().__init__(message, remedy)
        self.exit_code = exit_code
