"""Whether the hosts of a job reach each other: each checks all others before it starts, and watches some while it runs.

    peers = Peers("b", token, changed)
    port = await peers.listen("10.0.0.2")
    peers.places = {"a": Place(...), ...}    # where all of them listen, ours too
    await peers.reach()                      # raises Unreached: nothing has started, and why
    peers.watch()
    peers.cut                                # {"c": "no connection"}: changed() was called

Every host may reach the master, and two of the others not each other: the hub hears all of them, and ranks wait for
ever. A check opens a connection to a port that the kernel chose, as Gloo and NCCL do, and sends 64 KiB there and back:
a firewall lets no connection through, and where a path takes smaller packets than its ends believe, only large ones
vanish. Watching goes on over the connection that passed: `QUESTION_SEGMENTS` full segments there and back every BEAT_S.

Only what the network alone can do counts as cut. That somebody accepts a connection and says nothing is his kernel at
work, and a supervisor that is stopped, starved or gone: of that the hub's lease is the judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from errno import EACCES, ECONNREFUSED, EHOSTDOWN, EHOSTUNREACH, ENETUNREACH, EPERM, ETIMEDOUT
from typing import Any, NamedTuple

from .door import MAX_LINE, Door
from .firewall import opening
from .link import Link, greet_member, introduce

BEAT_S = 3.0
CONNECT_S = 5.0
"""TCP asks again after 1 and 3 s (tcp(7), tcp_syn_retries)."""
ANSWER_S = 8.0
PAUSE_S = 0.3
FILTERED_S = 15.0
"""Before the start, so long may no connection come about. The other's kernel answers, whatever its processes do."""
SILENT_S = 25.0
"""The same for an answer, which takes a process that may be slow to wake."""
TRIES = 3
"""At least so many: whoever stood still himself has waited for nothing."""
CUT_S = 40.0
"""While it runs: longer than the hub's lease, so that a host that is down is told as such."""
CHECK_BYTES = 1 << 15
CHECKS = 2
AT_ONCE = 16
NEIGHBOURS = 16
"""A host watches so many that follow it in the ring of all: every pair, up to 33 hosts."""
QUESTION_SEGMENTS = 2
BY_THE_NETWORK = {ECONNREFUSED, EHOSTUNREACH, ENETUNREACH, EHOSTDOWN, ETIMEDOUT, EACCES, EPERM}
"""How a connection fails that is not let through: a firewall may refuse, or let a router say so, or ours forbids it."""


class Place(NamedTuple):
    """Where a supervisor listens. firewall: which kind its host has (`firewall.kind`)."""

    address: str
    port: int
    interface: str
    firewall: str


class Unreached(Exception):
    """It says who, where, and what opens the way."""

    def __init__(self, node: str, words: str) -> None:
        super().__init__(words)
        self.node = node


class _Trouble(Exception):
    """One try failed. is_cut: by what only a network does. bear_s: so long that may go on before the start."""

    def __init__(self, words: str, *, is_cut: bool, bear_s: float) -> None:
        super().__init__(words)
        self.is_cut, self.bear_s = is_cut, bear_s


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

    def forget(self, names: Iterable[str]) -> None:
        """The job goes on without these hosts."""
        for name in names:
            if name in self._watches:
                self._watches.pop(name).cancel()
            self.cut.pop(name, None)

    def close(self) -> None:
        if self._door:
            self._door.close()
        self.close_rendezvous()
        self.forget([*self._watches])
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
                link.send({"answer": question["ask"], "pad": question["pad"]})

    def _key(self, listener: str) -> bytes:
        """Of this host's peer links alone: what is said to one is no word to another, nor to the hub."""
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
            except _Trouble as trouble:
                tries += 1
                if tries >= TRIES and _now_s() - began > trouble.bear_s:
                    raise Unreached(name, self._words(name, place, what, trouble)) from trouble
            await asyncio.sleep(PAUSE_S)

    def _words(self, name: str, place: Place, what: str, trouble: _Trouble) -> str:
        way = f"{self._name} cannot reach {name} at {place.address} port {place.port}, {what} ({trouble})"
        if trouble.bear_s != FILTERED_S:
            return way
        return f"{way}: {self.remedy(name)}"

    def remedy(self, name: str) -> str:
        """Where connections to this host do not come about."""
        place = self.places[name]
        sources = [self.places[self._name].address, *(other.address for other in self.places.values())]
        line = opening(place.firewall, place.interface, sources)
        return f"is a firewall on {name}? Ranks take any port: open all of them to the job's hosts there: {line}"

    async def _dial(self, name: str, place: Place, moving: Callable[[], None] = lambda: None) -> Link:
        """A link that has passed the check. Raises _Trouble. moving: as for `_ask`."""
        reader, writer = await _connect(place)
        try:
            link = await introduce(reader, writer, self._name, self._key(name))
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            raise _Trouble("it accepts a connection and says nothing", is_cut=False, bear_s=SILENT_S) from error
        try:
            for number in range(CHECKS):
                await _ask(link, number, CHECK_BYTES, moving)
        except asyncio.TimeoutError:
            link.close()
            words = "small packets pass and large ones do not: is the MTU too large somewhere on the way?"
            raise _Trouble(words, is_cut=True, bear_s=SILENT_S) from None
        except (OSError, ValueError) as error:
            link.close()
            raise _Trouble("it hung up", is_cut=False, bear_s=SILENT_S) from error
        return link

    # ---- while it runs --------------------------------------------------------------------------------------------

    async def _watch(self, name: str) -> None:
        self._heard_at[name], number = _now_s(), CHECKS
        moving = functools.partial(self._heard, name)
        link = self._links.pop(name, None)
        while name in self._watches:
            try:
                link = link or await self._dial(name, self.places[name], moving)
                self._heard(name)
                while True:
                    await asyncio.sleep(BEAT_S)
                    await _ask(link, number, QUESTION_SEGMENTS * _segment_bytes(link), moving)
                    self._heard(name)
                    number += 1
            except _Trouble as trouble:
                self._missed(name, trouble)
            except (OSError, ValueError, asyncio.TimeoutError):
                pass  # the next try tells why
            finally:
                if link:
                    link.close()
            link, number = None, CHECKS
            await asyncio.sleep(PAUSE_S)

    def _heard(self, name: str) -> None:
        self._heard_at[name] = _now_s()
        if self.cut.pop(name, None):
            self._changed()

    def _missed(self, name: str, trouble: _Trouble) -> None:
        if trouble.is_cut and name not in self.cut and _now_s() - self._heard_at[name] > CUT_S:
            self.cut[name] = str(trouble)
            self._changed()


async def _connect(place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        opened = asyncio.open_connection(place.address, place.port, limit=MAX_LINE)
        return await asyncio.wait_for(opened, CONNECT_S)
    except asyncio.TimeoutError:
        raise _Trouble("no connection", is_cut=True, bear_s=FILTERED_S) from None
    except OSError as error:
        is_cut = error.errno in BY_THE_NETWORK
        words = os.strerror(error.errno).lower() if error.errno else str(error)
        raise _Trouble(words, is_cut=is_cut, bear_s=FILTERED_S if is_cut else SILENT_S) from error


async def _ask(link: Link, number: int, size: int, moving: Callable[[], None]) -> None:
    """Waits for the answer as long as packets come through, there or back: where many are lost, that takes its time.
    Raises asyncio.TimeoutError, OSError or ValueError. moving: called when they have.
    """
    link.send({"ask": number, "pad": "." * size})
    there, back = _passed_bytes(link)
    while True:
        try:
            answer = await link.receive(ANSWER_S)
            break
        except asyncio.TimeoutError:
            now_there, now_back = _passed_bytes(link)
            if now_there - there + now_back - back < _segment_bytes(link) // 2:
                raise
            there, back = now_there, now_back
            moving()
    if answer.get("answer") != number:
        raise ConnectionError("an answer to something else")


def _passed_bytes(link: Link) -> tuple[int, int]:
    """Acknowledged by the other side, and received from it without a gap: tcpi_bytes_acked and tcpi_bytes_received of
    <linux/tcp.h>, Linux 4.1 or newer.
    """
    told = link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
    return struct.unpack_from("=QQ", told, 120) if len(told) >= 136 else (0, 0)


def _segment_bytes(link: Link) -> int:
    """What TCP puts into one packet here."""
    size = link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    return min(int(size), CHECK_BYTES // QUESTION_SEGMENTS)


async def _all_or_first_error(work: Sequence[Awaitable[Any]]) -> None:
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
