"""A member's connections: to the hub (`Membership`), and to all other hosts as a check (`Peers`)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from . import mesh
from .firewall import opening
from .link import Link, Listener, asyncio, greet_member, join_hub
from .mesh import Place, Trouble
from .messages import Order, Status

LEASE_S = 20.0  # default: after this long without a message, in either direction, the other side counts as gone


class Membership:
    """Stays connected to the hub, passes each new order to `obey`, and calls `gone` when the hub is gone."""

    def __init__(
        self,
        hub: tuple[str, int],
        node: str,
        token: bytes,
        status: Callable[[], Status],
        obey: Callable[[Order], None],
        gone: Callable[[str], None],
        silence_s: float | None = None,
    ) -> None:
        self._hub, self._node, self._token = hub, node, token
        self._status, self._obey, self._gone = status, obey, gone
        self._link: Link | None = None
        self._silent: Link | None = None
        self._closed = self._heard = self.host_is_up = False
        self._silence_s = self._lease_s = silence_s or LEASE_S
        self._deadline = 0.0

    def announce(self) -> None:
        if self._link:
            self._link.send(self._status())

    @property
    def has_connected(self) -> bool:
        return self._heard

    def close(self) -> None:
        # Ends `stay`. Cancelling its task may fail: before Python 3.12, `wait_for` can swallow the cancellation.
        self._closed = True
        self._hang_up(self._link, self._silent)

    async def stay(self, join_s: float) -> None:
        """Runs until the hub is gone: no answer for `join_s` at first, for the lease later, or connections refused."""
        loop = asyncio.get_running_loop()
        self._deadline, error = loop.time() + join_s, "no answer"
        refused: float | None = None
        while loop.time() < self._deadline and not self._closed:
            try:
                self._link = await join_hub(*self._hub, self._node, self._token)
                await self._exchange(self._link)
            except asyncio.TimeoutError:
                refused = None
                self._set_aside()
            except (OSError, ValueError) as broken:
                self._hang_up(self._link)
                self._link = None
                if isinstance(broken, ConnectionRefusedError):  # its host is up, but no process listens
                    refused = refused or loop.time()
                    self._deadline = min(self._deadline, refused + BROKEN_S)
                else:
                    refused = None
                error = str(broken)
            await asyncio.sleep(0.2)
        self._hang_up(self._link, self._silent)
        if not self._closed:
            self.host_is_up = refused is not None
            self._gone(self._why(error, refused))

    def _why(self, error: str, refused: float | None) -> str:
        if not self._heard:
            return f"cannot reach the master at {self._hub[0]}:{self._hub[1]} ({error})"
        if refused:
            return "the master's supervisor is gone"
        return f"no word from the master for {self._lease_s:.0f} s: it is down, frozen or cut off"

    async def _exchange(self, link: Link) -> None:
        beats = asyncio.create_task(self._beat())
        try:
            while not self._closed:
                order = cast(Order, await link.receive(QUIET_S))
                self._lease_s = lease_s(order, self._silence_s)
                self._heard, self._deadline = True, asyncio.get_running_loop().time() + self._lease_s
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
        # Keeps the silent connection until another one works: the hub would take its closing for our end.
        if self._link:
            self._hang_up(self._silent)
            self._silent, self._link = self._link, None

    @staticmethod
    def _hang_up(*links: Link | None) -> None:
        for link in filter(None, links):
            link.close()


# The lease (`--silence`) is mutual: a member without messages for that time ends its ranks, and a member that was
# itself frozen as long (`Pulse`) ignores later messages, since the others have gone on without it.

BEAT_S = 2.0
QUEUED_LEASE_S = 300.0  # nothing is lost if a job that waits for its GPUs waits for a host, too
QUIET_S = 6.0
"""Silence after which a member opens a second connection: TCP's pauses may outlast the lease after a cut of 10 s."""
BROKEN_S = 5.0  # the lease after a closed or refused connection: a live peer is back at once


def lease_s(order: Order, silence_s: float) -> float:
    return max(QUEUED_LEASE_S, silence_s) if order["do"] == "queue" else silence_s


class Pulse:
    """Detects that this process was frozen: stopped by a signal, starved, or suspended with the machine."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        self._last, self._longest_s = self._now(), 0.0

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._longest_s, self._last = self.longest_s, self._now()

    @property
    def longest_s(self) -> float:
        # The longest time between two beats, or since the last one: a task may ask before the next beat.
        return max(self._longest_s, self._now() - self._last)

    @staticmethod
    def _now() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)  # includes time in suspend


# Each host checks its connection to all others before the start, and watches some while the job runs: two members may
# reach the master but not each other, and their ranks would wait for ever. `mesh` checks one connection.
#
#     peers = Peers("b", token, changed)
#     port = await peers.listen("10.0.0.2")
#     peers.places = {"a": Place(...), ...}    # all hosts, ours too
#     await peers.reach()                      # raises Unreached
#     peers.watch()
#     peers.cut                                # {"c": "no connection"}; changed() was called

PEER_BEAT_S = 3.0
PAUSE_S = 0.3
TRIES = 3  # minimum number: a host that was frozen itself has not really waited
CUT_S = 40.0  # while the job runs: longer than the hub's lease, so that a host that is down is reported as such
AT_ONCE = 16
NEIGHBOURS = 16  # number of following hosts in the ring of all that a host watches: every pair, up to 33 hosts


class Unreached(Exception):
    def __init__(self, node: str, words: str) -> None:
        super().__init__(words)
        self.node = node


class Peers:
    """name: this host's. changed: called when a host is added to or removed from `cut`. lease_s: the hub's."""

    def __init__(self, name: str, token: bytes, changed: Callable[[], None], lease_s: float | None = None) -> None:
        self._cut_s = CUT_S * (lease_s / LEASE_S if lease_s else 1.0)
        self.cut: dict[str, str] = {}
        self.places: dict[str, Place] = {}
        self._name, self._token, self._changed = name, token, changed
        self._links: dict[str, Link] = {}
        self._received_at: dict[str, float] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._listener: Listener | None = None
        self._rendezvous: Listener | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def listen(self, address: str, door: socket.socket | None = None) -> int:
        """door: a listening socket to use."""
        self._listener = Listener(self._serve)
        return self._listener.open_at(door.dup()) if door else await self._listener.open(address)

    def open_rendezvous(self, listener: socket.socket) -> None:
        self._rendezvous = Listener(self._serve)
        self._rendezvous.open_at(listener)

    def close_rendezvous(self) -> None:
        if self._rendezvous:
            self._rendezvous.close()

    async def reach(self) -> None:
        checks = [self._check(name) for name in self._others()]
        await _all_or_first_error(checks)

    async def reach_rendezvous(self, master: str, port: int) -> None:
        link = await self._reach(master, self.places[master]._replace(port=port), "where the ranks will meet")
        link.close()

    def watch(self) -> None:
        for name in self._watched():
            self._watches[name] = asyncio.get_running_loop().create_task(self._watch(name))

    def close(self) -> None:
        if self._listener:
            self._listener.close()
        self.close_rendezvous()
        for watch in self._watches.values():
            watch.cancel()
        self.cut.clear()
        for link in self._links.values():
            link.close()

    # ---- hosts ----------------------------------------------------------------------------------------------

    def _others(self) -> list[str]:
        # In the order of the ring, so that not all connect to the same host first.
        names = [*self.places]
        place = names.index(self._name) if names else 0
        return names[place + 1 :] + names[:place]

    def _watched(self) -> list[str]:
        return self._others()[: min(NEIGHBOURS, len(self.places) // 2)]

    # ---- answering --------------------------------------------------------------------------------------------

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, known: Callable[[], None]
    ) -> None:
        _, link = await greet_member(reader, writer, self._key(self._name))
        known()
        with contextlib.suppress(OSError, ValueError, KeyError, asyncio.TimeoutError):  # it left, or its link failed
            while True:
                question = await link.receive(2 * self._cut_s)
                mesh.answer(link, question)

    def _key(self, listener: str) -> bytes:
        # A key for links to this host: messages to one host are invalid for others and for the hub.
        return hmac.new(self._token, f"peer {listener}".encode(), hashlib.sha256).digest()

    # ---- before the start ------------------------------------------------------------------------------------------

    async def _check(self, name: str) -> None:
        async with self._slots:
            link = await self._reach(name, self.places[name], "where its supervisor listens")
        if name in self._watched():
            self._links[name] = link
        else:
            link.close()

    async def _reach(self, name: str, place: Place, what: str) -> Link:
        began, tries = _now_s(), 0
        while True:
            try:
                return await self._dial(name, place)
            except Trouble as trouble:
                tries += 1
                if tries >= TRIES and _now_s() - began > trouble.bear_s:
                    raise Unreached(name, self._words(name, place, what, trouble)) from trouble
            await asyncio.sleep(PAUSE_S)

    def _words(self, name: str, place: Place, what: str, trouble: Trouble) -> str:
        said = f"{self._name} cannot reach {name} at {place.address} port {place.port}, {what} ({trouble})"
        if trouble.bear_s != mesh.FILTERED_S:
            return said
        return f"{said}: {self.remedy(name)}"

    def remedy(self, name: str) -> str:
        place = self.places[name]
        sources = [self.places[self._name].address, *(other.address for other in self.places.values())]
        line = opening(place.firewall, place.interface, sources)
        return f"is a firewall on {name}? Ranks take any port: open all of them to the job's hosts there: {line}"

    async def _dial(self, name: str, place: Place, moving: Callable[[], None] = lambda: None) -> Link:
        return await mesh.dial(place, self._name, self._key(name), moving)

    # ---- while it runs --------------------------------------------------------------------------------------------

    async def _watch(self, name: str) -> None:
        self._received_at[name], number = _now_s(), mesh.CHECKS
        moving = functools.partial(self._heard, name)
        link = self._links.pop(name, None)
        while name in self._watches:
            try:
                link = link or await self._dial(name, self.places[name], moving)
                self._heard(name)
                while True:
                    await asyncio.sleep(PEER_BEAT_S)
                    await mesh.ask(link, number, mesh.QUESTION_SEGMENTS * mesh.segment_bytes(link), moving)
                    self._heard(name)
                    number += 1
            except Trouble as trouble:
                self._missed(name, trouble)
            except (OSError, ValueError, asyncio.TimeoutError):
                pass  # the next try reports why
            finally:
                if link:
                    link.close()
            link, number = None, mesh.CHECKS
            await asyncio.sleep(PAUSE_S)

    def _heard(self, name: str) -> None:
        self._received_at[name] = _now_s()
        if self.cut.pop(name, None):
            self._changed()

    def _missed(self, name: str, trouble: Trouble) -> None:
        if trouble.is_cut and name not in self.cut and _now_s() - self._received_at[name] > self._cut_s:
            self.cut[name] = str(trouble)
            self._changed()


async def _all_or_first_error(work: Sequence[Awaitable[Any]]) -> None:
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
