"""The wire between the supervisors of one job: the master's is the hub, the others connect to it.

Every message is the sender's whole present state, sent on every change and every BEAT_S: nothing is lost with a broken
connection, because the next message says it all. A member sends its `status`, the hub sends its `order`.

    member -> hub   {"phase": "joined", "failure": null, ...}
    hub -> member   {"do": "start", "rendezvous_port": 29500, ...}

Both sides prove that they hold the job's token (HMAC-SHA256 over both sides' nonces, RFC 2104), then every line carries
a MAC over its direction and number with a key of this connection alone: nothing can be forged, replayed or reordered.
It authenticates and does not hide: no secret travels here. All deadlines are monotonic; no clocks are compared.

The lease binds both ways: who hears nothing for LEASE_S ends its own ranks, and who finds that it stood still for that
long itself (`Pulse`) does nothing more of what it then hears, for the others have gone on without it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from .door import MAX_LINE, Door

BEAT_S = 2.0
LEASE_S = 20.0
"""No word for this long, either way, and the other side counts as gone."""
QUIET_S = 6.0
"""After so long without a word a member dials again beside its old connection: after a cut, TCP waits longer and longer
before it tries again, and the wait after a cut of 10 s may well outlast the lease."""
BROKEN_S = 5.0
"""The lease of a member whose connection was closed, and of a hub that refuses one: a live peer is back at once."""
HANDSHAKE_S = 3.0

Message = dict[str, Any]


class Pulse:
    """Tells whether we ourselves stood still: stopped by a signal, starved, or asleep with the whole machine."""

    def __init__(self) -> None:
        self._last = self._now()
        self._longest_s = 0.0

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._longest_s, self._last = self.longest_s, self._now()

    @property
    def longest_s(self) -> float:
        """The longest time between two beats, the present one included: what wakes first may ask before it beats."""
        return max(self._longest_s, self._now() - self._last)

    @staticmethod
    def _now() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)  # counts a suspended machine's time, too


class Link:
    """One authenticated connection. Raises ConnectionError on anything that is not the expected next line."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, says: bytes, hears: bytes
    ) -> None:
        self._reader, self._writer, self._key = reader, writer, key
        self._says, self._hears = says, hears
        self._sent = self._received = 0

    def send(self, message: Message) -> None:
        body = json.dumps(message).encode()
        self._writer.write(_mac(self._key, self._says, self._sent, body) + b" " + body + b"\n")
        self._sent += 1

    async def receive(self, timeout_s: float) -> Message:
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
    ours = secrets.token_hex(16)
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
        ours = secrets.token_hex(16)
        key = _session_key(token, theirs, ours, node)
        mac = _mac(key, b"join", 0, node.encode()).decode()
        writer.write(json.dumps({"node": node, "nonce": ours, "mac": mac}).encode() + b"\n")
    except BaseException:
        writer.close()
        raise
    return Link(reader, writer, key, says=b"member", hears=b"hub")


class Hub:
    """The master's end: keeps the latest status of every member and who is gone.

    changed is called after every new status and every loss; `order` is sent on every beat and by `announce`.
    """

    def __init__(
        self, members: set[str], token: bytes, order: Callable[[], Message], changed: Callable[[], None]
    ) -> None:
        self.statuses: dict[str, Message] = {}
        self.lost: dict[str, str] = {}
        self.addresses: dict[str, str] = {}
        """Where each member was last heard from."""
        self._members, self._token, self._order, self._changed = members, token, order, changed
        self._links: dict[str, Link] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._heard_at: dict[str, float] = {}
        self._dismissed: dict[str, Message] = {}

    async def listen(self, address: str) -> int:
        """Binds a free port on the training address; returns it."""
        self._door = Door(self._serve)
        port = await self._door.open(address)
        self._place = f"{address} port {port}"
        self._beats = asyncio.create_task(self._beat())
        return port

    def expect(self, within_s: float, remedy: str) -> None:
        """From now on every member has to be heard, first within this time. remedy: for who is not."""
        why = f"did not reach the master at {self._place} within {within_s:.0f} s: {remedy}"
        for node in self._members - self._links.keys():
            self._set_deadline(node, within_s, why)

    def announce(self) -> None:
        for link in self._links.values():
            link.send(self._order())

    def is_dismissed(self, node: str) -> bool:
        return node in self._dismissed

    def dismiss(self, node: str, farewell: Message) -> None:
        """It has no part in this any more, and should it come back, this is all that it hears."""
        self._dismissed[node] = farewell
        if node in self._deadlines:
            self._deadlines.pop(node).cancel()
        if link := self._links.pop(node, None):
            link.send(farewell)
            link.close()

    @property
    def connected(self) -> int:
        return len(self._links)

    @property
    def is_cut_off(self) -> bool:
        """Whether all of several hosts fell silent at once: then it is rather we who cannot be reached."""
        since = asyncio.get_running_loop().time() - (LEASE_S - 2 * BEAT_S)
        present = self._members - self._dismissed.keys()
        return len(present) > 1 and all(self._heard_at.get(node, since + 1) < since for node in present)

    def close(self) -> None:
        self._beats.cancel()
        self._door.close()
        for deadline in self._deadlines.values():
            deadline.cancel()
        for link in self._links.values():
            link.close()

    async def _beat(self) -> None:
        while True:
            self.announce()
            await asyncio.sleep(BEAT_S)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, known: Callable[[], None]
    ) -> None:
        node, link = await greet_member(reader, writer, self._token)  # what a stranger says ends no more than its visit
        known()
        if node not in self._members or node in self._dismissed:
            if node in self._dismissed:
                link.send(self._dismissed[node])
            return
        previous = self._links.get(node)
        if previous:
            previous.close()
        self._links[node] = link
        self.addresses[node] = str(writer.get_extra_info("peername")[0])
        link.send(self._order())
        try:
            while True:
                status = await link.receive(LEASE_S)
                self._heard(node, status)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            self._broken(node, link, silent=isinstance(error, asyncio.TimeoutError))

    def _heard(self, node: str, status: Message) -> None:
        if node in self._dismissed:
            return
        self._heard_at[node] = asyncio.get_running_loop().time()
        self._set_deadline(node, LEASE_S, f"no word for {LEASE_S:.0f} s: host down, frozen or cut off")
        if self.statuses.get(node) != status:
            self.statuses[node] = status
            self._changed()

    def _broken(self, node: str, link: Link, silent: bool) -> None:
        link.close()
        if self._links.get(node) is not link:
            return  # it has already dialled again
        del self._links[node]
        if self.statuses.get(node, {}).get("phase") == "ended":
            if node in self._deadlines:
                self._deadlines.pop(node).cancel()
            self._changed()
        elif not silent:
            self._set_deadline(node, BROKEN_S, "its supervisor is gone: killed, or the host went down")

    def _set_deadline(self, node: str, within_s: float, why: str) -> None:
        if node in self._deadlines:
            self._deadlines[node].cancel()
        self._deadlines[node] = asyncio.get_running_loop().call_later(within_s, self._lose, node, why)

    def _lose(self, node: str, why: str) -> None:
        self.lost.setdefault(node, why)
        self._changed()


class Membership:
    """A member's end: stays connected, hands every new order to `obey`, calls `gone` when the hub is no more."""

    def __init__(
        self,
        hub: tuple[str, int],
        node: str,
        token: bytes,
        status: Callable[[], Message],
        obey: Callable[[Message], None],
        gone: Callable[[str], None],
    ) -> None:
        self._hub, self._node, self._token = hub, node, token
        self._status, self._obey, self._gone = status, obey, gone
        self._link: Link | None = None
        self._silent: Link | None = None
        self._closed = self._heard = False

    def announce(self) -> None:
        if self._link:
            self._link.send(self._status())

    @property
    def has_heard(self) -> bool:
        """Whether the hub has ever spoken to us."""
        return self._heard

    def close(self) -> None:
        """Ends `stay`. Cancelling its task does not always: before Python 3.12, `wait_for` may swallow that."""
        self._closed = True
        self._hang_up(self._link, self._silent)

    async def stay(self, join_s: float) -> None:
        """Runs until the hub is gone: unheard of for `join_s` at first, later for the lease, or refusing us."""
        loop = asyncio.get_running_loop()
        self._deadline, error = loop.time() + join_s, "no answer"
        refused: float | None = None
        while loop.time() < self._deadline and not self._closed:
            try:
                self._link = await join_hub(*self._hub, self._node, self._token)
                await self._talk(self._link)
            except asyncio.TimeoutError:
                refused = None
                self._set_aside()
            except (OSError, ValueError) as broken:
                self._hang_up(self._link)
                self._link = None
                if isinstance(broken, ConnectionRefusedError):  # its host is up, and nobody listens there
                    refused = refused or loop.time()
                    self._deadline = min(self._deadline, refused + BROKEN_S)
                else:
                    refused = None
                error = str(broken)
            await asyncio.sleep(0.2)
        self._hang_up(self._link, self._silent)
        if not self._closed:
            self._gone(self._why(error, refused))

    def _why(self, error: str, refused: float | None) -> str:
        if not self._heard:
            return f"cannot reach the master at {self._hub[0]}:{self._hub[1]} ({error})"
        if refused:
            return "the master's supervisor is gone"
        return f"no word from the master for {LEASE_S:.0f} s: it is down, frozen or cut off"

    async def _talk(self, link: Link) -> None:
        beats = asyncio.create_task(self._beat())
        try:
            while not self._closed:
                order = await link.receive(QUIET_S)
                self._heard, self._deadline = True, asyncio.get_running_loop().time() + LEASE_S
                self._hang_up(self._silent)
                self._silent = None
                self._obey(order)
        finally:
            beats.cancel()

    async def _beat(self) -> None:
        while True:
            self.announce()
            await asyncio.sleep(BEAT_S)

    def _set_aside(self) -> None:
        """Keeps the silent connection open until another one speaks: the hub would take its closing for our end."""
        if self._link:
            self._hang_up(self._silent)
            self._silent, self._link = self._link, None

    @staticmethod
    def _hang_up(*links: Link | None) -> None:
        for link in filter(None, links):
            link.close()


async def _read_line(reader: asyncio.StreamReader, timeout_s: float | None) -> bytes:
    line = await asyncio.wait_for(reader.readline(), timeout_s)
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection was closed")
    return line[:-1]


def _session_key(token: bytes, hub_nonce: str, member_nonce: str, node: str) -> bytes:
    return hmac.new(token, f"{hub_nonce} {member_nonce} {node}".encode(), hashlib.sha256).digest()


def _mac(key: bytes, direction: bytes, number: int, body: bytes) -> bytes:
    return hmac.new(key, b"%s %d %s" % (direction, number, body), hashlib.sha256).hexdigest().encode()
