"""Turns at SSH servers: many hosts may share one as their jump host, and it takes few logins at once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from orchestrator.errors import AuthError, ConnectError
from orchestrator.transport.deadline import Deadline
from orchestrator.transport.route import Hop
from orchestrator.transport.ssh_errors import hung_up_early

HANDSHAKES_PER_SERVER = 8  # sshd's MaxStartups drops logins at random from 10 on; matters most for a jump host


class _Server:
    """An SSH server, which many hosts share when it is their jump host.

    failures: by hop, when we last failed to get through, and why.
    """

    def __init__(self) -> None:
        self.slots = threading.Semaphore(HANDSHAKES_PER_SERVER)
        self.failures: dict[Hop, tuple[float, ConnectError | AuthError]] = {}


_servers: dict[tuple[str, int], _Server] = {}


@contextlib.contextmanager
def login_slot(hop: Hop, deadline: Deadline) -> Iterator[None]:
    """At most so many handshakes with one server at once. What a jump host did to one who stood before us in the queue
    it would do to us: a dead one is not dialled for each host behind it.
    """
    server = _servers.setdefault((hop.host, hop.port), _Server())
    anybodys = replace(hop, peer=replace(hop.peer, node=""))
    came_at = time.monotonic()
    with deadline.paused():
        server.slots.acquire()
    try:
        failed_at, failure = server.failures.get(anybodys, (0.0, None))
        if failure and failed_at > came_at:
            raise type(failure)(hop.peer.node, failure.message.removeprefix(f"{failure.node}: "), failure.remedy)
        try:
            yield
        except (ConnectError, AuthError) as error:
            if hop.peer.jump and not hung_up_early(error.__cause__):
                server.failures[anybodys] = (time.monotonic(), error)
            raise
    finally:
        server.slots.release()
