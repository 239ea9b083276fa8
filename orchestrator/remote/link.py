"""An authenticated connection between two supervisors of one job, and how both sides prove that they belong to it.

    link = await join_hub("10.0.0.1", 4711, "beta", token)     # or `introduce`, on a connection that stands
    node, link = await greet_member(reader, writer, token)     # the other side
    link.send({"phase": "joined"})
    order = await link.receive(timeout_s)

Both sides prove that they hold the job's token (HMAC-SHA256 over both sides' nonces, RFC 2104), then every line carries
a MAC over its direction and number with a key of this connection alone: nothing can be forged, replayed or reordered.
It authenticates and does not hide: no secret travels here. All deadlines are monotonic; no clocks are compared.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from typing import Any

from .door import MAX_LINE
from .plain_asyncio import asyncio

HANDSHAKE_S = 3.0


class Link:
    """One authenticated connection. Raises ConnectionError on anything that is not the expected next line."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, says: bytes, hears: bytes
    ) -> None:
        self._reader, self._writer, self._key = reader, writer, key
        self._says, self._hears = says, hears
        self._sent = self._received = 0

    def send(self, message: Mapping[str, Any]) -> None:
        body = json.dumps(message).encode()
        self._writer.write(_mac(self._key, self._says, self._sent, body) + b" " + body + b"\n")
        self._sent += 1

    async def receive(self, timeout_s: float) -> dict[str, Any]:
        line = await _read_line(self._reader, timeout_s)
        mac, _, body = line.partition(b" ")
        if not hmac.compare_digest(mac, _mac(self._key, self._hears, self._received, body)):
            raise ConnectionError("a message does not carry this job's mark")
        self._received += 1
        return dict(json.loads(body))

    def close(self) -> None:
        self._writer.close()

    @property
    def socket(self) -> Any:
        return self._writer.get_extra_info("socket")


async def greet_member(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> tuple[str, Link]:
    """The hub's side of the handshake: the member's name and the link to it. The `door` says how long it may take."""
    ours = os.urandom(16).hex()
    writer.write(ours.encode() + b"\n")
    answer = json.loads(await _read_line(reader, None))
    node, theirs = str(answer["node"]), str(answer["nonce"])
    key = _session_key(token, ours, theirs, node)
    if not hmac.compare_digest(str(answer["mac"]).encode(), _mac(key, b"join", 0, node.encode())):
        raise ConnectionError("a stranger without this job's token")
    return node, Link(reader, writer, key, says=b"hub", hears=b"member")


async def join_hub(address: str, port: int, node: str, token: bytes) -> Link:
    """The member's side. The hub proves itself with its first order."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port, limit=MAX_LINE), HANDSHAKE_S)
    return await introduce(reader, writer, node, token)


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, node: str, token: bytes) -> Link:
    """Who we are, to a `greet_member` on the other side, which proves itself with the first line that it sends."""
    try:
        theirs = (await _read_line(reader, HANDSHAKE_S)).decode()
        ours = os.urandom(16).hex()
        key = _session_key(token, theirs, ours, node)
        mac = _mac(key, b"join", 0, node.encode()).decode()
        writer.write(json.dumps({"node": node, "nonce": ours, "mac": mac}).encode() + b"\n")
    except BaseException:
        writer.close()
        raise
    return Link(reader, writer, key, says=b"member", hears=b"hub")


async def _read_line(reader: asyncio.StreamReader, timeout_s: float | None) -> bytes:
    line = await asyncio.wait_for(reader.readline(), timeout_s)
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection was closed")
    return line[:-1]


def _session_key(token: bytes, hub_nonce: str, member_nonce: str, node: str) -> bytes:
    return hmac.new(token, f"{hub_nonce} {member_nonce} {node}".encode(), hashlib.sha256).digest()


def _mac(key: bytes, direction: bytes, number: int, body: bytes) -> bytes:
    return hmac.new(key, b"%s %d %s" % (direction, number, body), hashlib.sha256).hexdigest().encode()
