"""A member's end of what the supervisors of a job say to each other (`hub`): it stays connected to the master's."""

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
from .link import Door, Link, greet_member, join_hub
from .mesh import Place, Trouble
from .messages import Order, Status
from .plain_asyncio import asyncio


class Membership:
    """A member's end: stays connected, hands every new order to `obey`, calls `gone` when the hub is no more."""

    def __init__(
        self,
        hub: tuple[str, int],
        node: str,
        token: bytes,
        status: Callable[[], Status],
        obey: Callable[[Order], None],
        gone: Callable[[str], None],
    ) -> None:
        self._hub, self._node, self._token = hub, node, token
        self._status, self._obey, self._gone = status, obey, gone
        self._link: Link | None = None
        self._silent: Link | None = None
        self._closed = self._heard = False
        self._deadline = 0.0

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
                order = cast(Order, await link.receive(QUIET_S))
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


# How long a supervisor that is not heard counts as there; and whether we ourselves stood still for so long.
#
# The lease is mutual: who hears nothing for LEASE_S ends its own ranks, and who finds that it stood still for that
# long itself (`Pulse`) does nothing more of what it then hears, for the others have gone on without it.

BEAT_S = 2.0
LEASE_S = 20.0
"""No word for this long, either way, and the other side counts as gone."""
QUIET_S = 6.0
"""After so long without a word a member dials again beside its old connection: after a cut, TCP waits longer and longer
before it tries again, and the wait after a cut of 10 s may well outlast the lease."""
BROKEN_S = 5.0
"""The lease of a member whose connection was closed, and of a hub that refuses one: a live peer is back at once."""


class Pulse:
    """Detects that we ourselves stood still: stopped by a signal, starved, or asleep with the whole machine."""

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


# Whether the hosts of a job reach each other: each checks all others before it starts, and watches some while it runs.
#
#     peers = Peers("b", token, changed)
#     port = await peers.listen("10.0.0.2")
#     peers.places = {"a": Place(...), ...}    # where all of them listen, ours too
#     await peers.reach()                      # raises Unreached: nothing has started, and why
#     peers.watch()
#     peers.cut                                # {"c": "no connection"}: changed() was called
#
# Every host may reach the master, and two of the others not each other: the hub hears all of them, and ranks wait for
# ever. How one way is checked is in `mesh`. Watching goes on over the connection that passed: `QUESTION_SEGMENTS` full
# segments there and back every BEAT_S.

PEER_BEAT_S = 3.0
PAUSE_S = 0.3
TRIES = 3
"""At least so many: whoever stood still himself has waited for nothing."""
CUT_S = 40.0
"""While it runs: longer than the hub's lease, so that a host that is down is reported as such."""
AT_ONCE = 16
NEIGHBOURS = 16
"""A host watches so many that follow it in the ring of all: every pair, up to 33 hosts."""


class Unreached(Exception):
    """It says who, where, and what opens the way."""

    def __init__(self, node: str, words: str) -> None:
        super().__init__(words)
        self.node = node


class Peers:
    """name: this host's. changed: called when somebody came to be `cut`, or is no longer."""

    def __init__(self, name: str, token: bytes, changed: Callable[[], None]) -> None:
        self.cut: dict[str, str] = {}
        self.places: dict[str, Place] = {}
        self._name, self._token, self._changed = name, token, changed
        self._links: dict[str, Link] = {}
        self._heard_at: dict[str, float] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._door: Door | None = None
        self._rendezvous: Door | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def listen(self, address: str) -> int:
        """On a free port of this address alone; returns it. From now on the others find somebody."""
        self._door = Door(self._serve)
        return await self._door.open(address)

    def open_rendezvous(self, listener: socket.socket) -> None:
        """listener: where the ranks will meet. The way there can be checked until `close_rendezvous`."""
        self._rendezvous = Door(self._serve)
        self._rendezvous.open_at(listener)

    def close_rendezvous(self) -> None:
        if self._rendezvous:
            self._rendezvous.close()

    async def reach(self) -> None:
        """Checks the way to every other host. Raises Unreached, of the first that fails."""
        checks = [self._check(name) for name in self._others()]
        await _all_or_first_error(checks)

    async def reach_rendezvous(self, master: str, port: int) -> None:
        """Raises Unreached."""
        link = await self._reach(master, self.places[master]._replace(port=port), "where the ranks will meet")
        link.close()

    def watch(self) -> None:
        """From now on those who follow us among all hosts; all of them have been reached."""
        for name in self._watched():
            self._watches[name] = asyncio.get_running_loop().create_task(self._watch(name))

    def close(self) -> None:
        if self._door:
            self._door.close()
        self.close_rendezvous()
        for watch in self._watches.values():
            watch.cancel()
        self.cut.clear()
        for link in self._links.values():
            link.close()

    # ---- who ------------------------------------------------------------------------------------------------

    def _others(self) -> list[str]:
        """In the order of the ring, so that not all knock at the same door first."""
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
        with contextlib.suppress(OSError, ValueError, KeyError, asyncio.TimeoutError):  # it left: how any link ends
            while True:
                question = await link.receive(2 * CUT_S)
                mesh.answer(link, question)

    def _key(self, listener: str) -> bytes:
        """The key of this host's peer links alone: what is said to one is no word to another, nor to the hub."""
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
        """Where connections to this host do not come about."""
        place = self.places[name]
        sources = [self.places[self._name].address, *(other.address for other in self.places.values())]
        line = opening(place.firewall, place.interface, sources)
        return f"is a firewall on {name}? Ranks take any port: open all of them to the job's hosts there: {line}"

    async def _dial(self, name: str, place: Place, moving: Callable[[], None] = lambda: None) -> Link:
        return await mesh.dial(place, self._name, self._key(name), moving)

    # ---- while it runs --------------------------------------------------------------------------------------------

    async def _watch(self, name: str) -> None:
        self._heard_at[name], number = _now_s(), mesh.CHECKS
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
                pass  # the next try says why
            finally:
                if link:
                    link.close()
            link, number = None, mesh.CHECKS
            await asyncio.sleep(PAUSE_S)

    def _heard(self, name: str) -> None:
        self._heard_at[name] = _now_s()
        if self.cut.pop(name, None):
            self._changed()

    def _missed(self, name: str, trouble: Trouble) -> None:
        if trouble.is_cut and name not in self.cut and _now_s() - self._heard_at[name] > CUT_S:
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
