"""Authenticated connections between the supervisors of one job, and the listener that accepts them.

    link = await join_hub("10.0.0.1", 4711, "beta", token)     # or `introduce`, on an open connection
    node, link = await greet_member(reader, writer, token)     # the other side
    link.send({"phase": "joined"})
    order = await link.receive(timeout_s)

Both sides prove that they hold the job's token (HMAC-SHA256 over both nonces, RFC 2104). Every line then carries a MAC
over its direction and number with a key of this connection, so that lines cannot be forged, replayed or reordered.
Nothing is encrypted: no secret is sent here. All deadlines are monotonic.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import os
import resource
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

# asyncio without `ssl`, which hosts do not use: it takes a fifth of the import time, and memory. It supports Python
# builds without `ssl`. Other modules have `from .link import asyncio`.

if "asyncio" not in sys.modules and "ssl" not in sys.modules:
    sys.modules["ssl"] = None  # type: ignore[assignment]  # what Python takes for a module that there is not
    import asyncio as asyncio

    del sys.modules["ssl"]
else:
    import asyncio as asyncio


HANDSHAKE_S = 3.0


class Link:
    """Raises ConnectionError on anything but the expected next line."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        key: bytes,
        sends_as: bytes,
        receives_as: bytes,
    ) -> None:
        self._reader, self._writer, self._key = reader, writer, key
        self._sends_as, self._receives_as = sends_as, receives_as
        self._sent = self._received = 0

    def send(self, message: Mapping[str, Any]) -> None:
        body = json.dumps(message).encode()
        self._writer.write(mac_of(self._key, self._sends_as, self._sent, body) + b" " + body + b"\n")
        self._sent += 1

    async def receive(self, timeout_s: float) -> dict[str, Any]:
        line = await _read_line(self._reader, timeout_s)
        mac, _, body = line.partition(b" ")
        if not hmac.compare_digest(mac, mac_of(self._key, self._receives_as, self._received, body)):
            raise ConnectionError("a message does not carry this job's mark")
        self._received += 1
        return dict(json.loads(body))

    def close(self) -> None:
        self._writer.close()

    @property
    def socket(self) -> Any:
        return self._writer.get_extra_info("socket")


async def greet_member(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> tuple[str, Link]:
    """The hub's side: the member's name and the link to it. `Listener` limits its time."""
    ours = os.urandom(16).hex()
    writer.write(ours.encode() + b"\n")
    answer = json.loads(await _read_line(reader, None))
    node, theirs = str(answer["node"]), str(answer["nonce"])
    key = session_key(token, ours, theirs, node)
    if not hmac.compare_digest(str(answer["mac"]).encode(), mac_of(key, b"join", 0, node.encode())):
        raise ConnectionError("a connection without this job's token")
    return node, Link(reader, writer, key, sends_as=b"hub", receives_as=b"member")


async def join_hub(address: str, port: int, node: str, token: bytes) -> Link:
    """The member's side. The hub proves itself with its first order."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port, limit=MAX_LINE), HANDSHAKE_S)
    return await introduce(reader, writer, node, token)


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, node: str, token: bytes) -> Link:
    """Identifies us to a `greet_member`, which proves itself with its first line."""
    try:
        theirs = (await _read_line(reader, HANDSHAKE_S)).decode()
        ours = os.urandom(16).hex()
        key = session_key(token, theirs, ours, node)
        mac = mac_of(key, b"join", 0, node.encode()).decode()
        writer.write(json.dumps({"node": node, "nonce": ours, "mac": mac}).encode() + b"\n")
    except BaseException:
        writer.close()
        raise
    return Link(reader, writer, key, sends_as=b"member", receives_as=b"hub")


async def _read_line(reader: asyncio.StreamReader, timeout_s: float | None) -> bytes:
    line = await asyncio.wait_for(reader.readline(), timeout_s)
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection was closed")
    return line[:-1]


def session_key(token: bytes, hub_nonce: str, member_nonce: str, node: str) -> bytes:
    return hmac.new(token, f"{hub_nonce} {member_nonce} {node}".encode(), hashlib.sha256).digest()


def mac_of(key: bytes, direction: bytes, number: int, body: bytes) -> bytes:
    return hmac.new(key, b"%s %d %s" % (direction, number, body), hashlib.sha256).hexdigest().encode()


# A listener accepts every newcomer. At most STRANGERS connections are unauthenticated, for STRANGER_S each; when full,
# the oldest one of the busiest address is closed. So a flood from one address keeps no member out, and takes no
# descriptor that the job needs.
#
#     listener = Listener(serve)               # serve(reader, writer, known); known(): the peer is authenticated
#     port = await listener.open("10.0.0.1")   # a free port of this address only
#     listener.close()

STRANGERS = 64
STRANGER_S = 3.0  # time to authenticate: 1 s, and 2 s for lost packets
SHARE = 8  # unauthenticated connections take at most this fraction (1/8) of our descriptors
BACKLOG = 512
RETRY_S = 0.1
MAX_LINE = 1 << 16

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Callable[[], None]], Awaitable[None]]


class Listener:
    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._strangers: dict[asyncio.Task[None], str] = {}  # oldest first, with each one's address
        self._known: set[asyncio.Task[None]] = set()

    async def open(self, address: str) -> int:
        """Listens on a free port of this address; returns it. Raises OSError."""
        return self.open_at(listen_at(address))

    def open_at(self, listener: socket.socket) -> int:
        self._most = max(1, min(STRANGERS, allow_descriptors() // SHARE))
        self._listener = listener
        self._listener.setblocking(False)
        self._listen()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stops accepting; authenticated connections stay open."""
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for task in self._strangers:
            task.cancel()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        # Accepts one connection per call, so that a crowd does not block the event loop.
        loop = asyncio.get_running_loop()
        try:
            connection, peer = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has gone again
        except OSError:  # no descriptor is left: newcomers wait, and nothing is logged
            self._drop_oldest()
            loop.remove_reader(self._listener)
            loop.call_later(RETRY_S, self._listen)
            return
        if len(self._strangers) >= self._most:
            self._drop_oldest()
        connection.setblocking(False)
        task = loop.create_task(self._receive(connection))
        task.add_done_callback(functools.partial(self._forget, connection))
        self._strangers[task] = str(peer[0])

    def _drop_oldest(self) -> None:
        if self._strangers:
            crowd = Counter(self._strangers.values()).most_common(1)[0][0]
            oldest = next(task for task, address in self._strangers.items() if address == crowd)
            del self._strangers[oldest]
            oldest.cancel()

    async def _receive(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task
        deadline = asyncio.get_running_loop().call_later(STRANGER_S, task.cancel)

        def known() -> None:
            deadline.cancel()
            self._strangers.pop(task, None)
            self._known.add(task)

        reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE)
        try:
            await self._serve(reader, writer, known)
        finally:
            deadline.cancel()
            # An unauthenticated peer may never read to the end.
            (writer.close if task in self._known else writer.transport.abort)()

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        if task not in self._known:
            connection.close()  # also if its task was cancelled before it began
        self._known.discard(task)
        if not task.cancelled():
            task.exception()  # read, so that nothing is logged


def listen_at(address: str, port: int = 0) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def allow_descriptors() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the kernel allows fewer by now
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
