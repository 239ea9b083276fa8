"""Transfers that may take more than one link to a host: resumed on a new one as long as they get on.

outcomes = on_each_link(sessions, reopen)           {"a2000": what `run` gave, "v100": its HostError}
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from orchestrator.errors import ConnectError, HostError
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import for_each

FOREVER_S = 30 * 24 * 3600.0
"""A transfer has no limit of time: its bytes, or the host's beats, say that it goes on."""

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Session(Protocol[ResultT_co]):
    """A transfer that may need several links."""

    host: ConnectedHost
    """Where the next link leads."""
    moved_bytes: int
    """Never fewer than before; more means progress."""

    def run(self) -> ResultT_co:
        """To its end over one link. Raises ConnectError where that breaks, HostError for what no new link mends."""


def on_each_link(
    sessions: Mapping[str, Session[ResultT]], reopen: Callable[[str], ConnectedHost]
) -> dict[str, ResultT | HostError]:
    """All hosts at once. reopen: a new connection to a host whose link broke."""
    over = threading.Event()

    def one(session: Session[ResultT]) -> ResultT:
        while True:
            before = session.moved_bytes
            try:
                return session.run()
            except ConnectError:  # while it gets on from one link to the next, it is worth another
                if over.is_set() or session.moved_bytes == before:
                    raise
            session.host = reopen(session.host.node)

    try:
        return for_each(sessions, one, deadline_s=FOREVER_S, at_once=max(1, len(sessions)))
    finally:
        over.set()
