"""The way from this host to every other one, tried in both directions before any job: for `orch doctor`.

Request: {"name", "address", "token": the same for all hosts, "limit_s"}. It reports (see `talk`):

    {"port": 41234, "firewall": "ufw"}   where it listens, on this address alone; {"closed": WORDS} where it cannot

Then each line of its input is something to do, and is answered by one word:

    {"reach": {NAME: PLACE}}             {"reached": {NAME: {"kind", "words", "opens", "round_trip_s"}}}
    {"send": NAME, "seconds": 0.3}       {"sent": NAME, "round_trip_s", "bits_per_s"}     null: no figure
    {"over": 1}                          {"end": {}}

A place is {"address", "port", "interface", "firewall", "ssh_port"}. kind is "open" or one of `mesh.Kind`; a silent way
to a host of which another port answers is "filtered". opens: the line for the other host's firewall that may help.

Who connects has to prove that it holds the token, as to a supervisor (`link`, `link`). It ends, and listens no more,
with its input, with its connection, and at the latest after limit_s, whatever else it is at.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from errno import EACCES, ECONNREFUSED, EHOSTDOWN, EHOSTUNREACH, ENETUNREACH, EPERM, ETIMEDOUT
from typing import Any, Literal, NamedTuple

from . import firewall
from .link import MAX_LINE, Door, Link, greet_member, introduce
from .plain_asyncio import asyncio
from .talk import Talk, serve

MOST_S = 60.0
ROUND_TRIPS = 11
KNOCK_S = 2.0
TRIES = 2
AT_ONCE = 16
BLOCK = bytes(1 << 18)
RAMP = 0.3
"""So much of a transfer passes before it is measured: TCP begins slowly, and a shaped link lets a burst through."""
ANSWER_S = 15.0


def main(request: dict[str, Any]) -> None:
    limit = threading.Timer(min(MOST_S, request["limit_s"]), os._exit, [0])
    limit.daemon = True
    limit.start()
    serve(request, lambda request, talk: asyncio.run(take_part(request, talk)))


async def take_part(request: dict[str, Any], talk: Talk) -> dict[str, Any]:
    mesh = Mesh(request["name"], request["address"], bytes.fromhex(request["token"]))
    try:
        talk.say({"port": await mesh.listen(), "firewall": firewall.kind()})
    except OSError as error:
        talk.say({"closed": f"{error.strerror or error} ({request['address']})"})
        return {}
    lines = orders()
    while order := await lines.get():
        if "reach" in order:
            talk.say({"reached": await mesh.reach(order["reach"])})
        elif "send" in order:
            talk.say({"sent": order["send"], **await mesh.send(order["send"], order["seconds"])})
    return {}


def orders() -> asyncio.Queue[dict[str, Any]]:
    """The lines of our input as they come; {} as the last. Read in a thread: our request came by the same buffer."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()

    def read() -> None:
        for line in sys.stdin.buffer:
            order = json.loads(line)
            loop.call_soon_threadsafe(lines.put_nowait, {} if "over" in order else order)
        os._exit(0)  # the controller has left

    threading.Thread(target=read, daemon=True).start()
    return lines


class Mesh:
    def __init__(self, name: str, address: str, token: bytes) -> None:
        self._name, self._address, self._token = name, address, token
        self._door = Door(self._serve)
        self._places: dict[str, Place] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def listen(self) -> int:
        """Raises OSError."""
        return await self._door.open(self._address)

    def close(self) -> None:
        self._door.close()

    def _key(self, listener: str) -> bytes:
        return hmac.new(self._token, f"mesh {listener}".encode(), hashlib.sha256).digest()

    # ---- answering --------------------------------------------------------------------------------------------

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, known: Callable[[], None]
    ) -> None:
        _, link = await greet_member(reader, writer, self._key(self._name))
        known()
        with contextlib.suppress(OSError, ValueError, KeyError, asyncio.TimeoutError):  # it left: how any link ends
            while True:
                question = await link.receive(MOST_S)
                if "take" in question:
                    found = await asyncio.wait_for(measured(reader, float(question["take"])), ANSWER_S)
                    link.send({"bits_per_s": found})
                    await writer.drain()
                else:
                    answer(link, question)

    # ---- asking -----------------------------------------------------------------------------------------------

    async def reach(self, others: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Every other host at once: how the way there is."""
        fields = ("address", "port", "interface", "firewall")
        self._places = {name: Place(*(place[field] for field in fields)) for name, place in others.items()}
        found = await asyncio.gather(*(self._reach(name, others[name]["ssh_port"]) for name in others))
        return dict(zip(others, found, strict=True))

    async def _reach(self, name: str, ssh_port: int) -> dict[str, Any]:
        async with self._slots:
            for left in reversed(range(TRIES)):
                try:
                    return await self._try(name)
                except Trouble as trouble:
                    if trouble.kind in ("mute", "hung up") and left:
                        continue  # by a process that was slow to wake
                    place = self._places[name]
                    is_there = trouble.kind == "silent" and await answers(place.address, ssh_port)
                    kind = "filtered" if is_there else trouble.kind
                    return {"kind": kind, "words": str(trouble), "opens": self._opening(place)}
        raise AssertionError

    def _opening(self, place: Place) -> str:
        sources = [self._address, *(other.address for other in self._places.values())]
        return firewall.opening(place.firewall, place.interface, sources)

    async def _try(self, name: str) -> dict[str, Any]:
        """Raises Trouble."""
        link = await dial(self._places[name], self._name, self._key(name), lambda: None)
        try:
            return {"kind": "open", "words": "", "round_trip_s": await round_trip_s(link)}
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            raise Trouble("hung up", "it hung up", is_cut=False, bear_s=0.0) from error
        finally:
            link.close()

    async def send(self, name: str, seconds: float) -> dict[str, float | None]:
        """A round trip while little else is going on, then as many bytes as pass in this time, as the other side
        measured them.
        """
        found: dict[str, float | None] = {"round_trip_s": None, "bits_per_s": None}
        with contextlib.suppress(Trouble, OSError, ValueError, KeyError, asyncio.TimeoutError):
            reader, writer = await connect(self._places[name])
            link = await introduce(reader, writer, self._name, self._key(name))
            try:
                found["round_trip_s"] = await round_trip_s(link)
                found["bits_per_s"] = await asyncio.wait_for(flood(link, writer, seconds), ANSWER_S)
            finally:
                link.close()
        return found


async def round_trip_s(link: Link) -> float:
    """The median of some. Raises OSError, ValueError or asyncio.TimeoutError."""
    times_s = []
    for number in range(CHECKS, CHECKS + ROUND_TRIPS):
        began = time.perf_counter()
        await ask(link, number, 0, lambda: None)
        times_s.append(time.perf_counter() - began)
    return statistics.median(times_s)


async def flood(link: Link, writer: asyncio.StreamWriter, seconds: float) -> float | None:
    link.send({"take": seconds})
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        writer.write(BLOCK)
        await writer.drain()
    writer.write_eof()
    found = (await link.receive(ANSWER_S))["bits_per_s"]
    return None if found is None else float(found)


async def measured(reader: asyncio.StreamReader, seconds: float) -> float | None:
    """Bits a second of what comes until its end; None where nothing came after the ramp."""
    began = time.monotonic()
    since, last, count = None, began, 0
    while data := await reader.read(len(BLOCK)):
        last = time.monotonic()
        if since is not None:
            count += len(data)
        elif last - began > RAMP * seconds:
            since = last
    return 8 * count / (last - since) if since is not None and last > since else None


async def answers(address: str, port: int) -> bool:
    """Whether anything at this address says a word to a connection, were it a refusal."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), KNOCK_S)
        writer.close()
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    return True


# The way to one other host's supervisor: dialled, checked, and asked whether it still passes what it should.
#
#     link = await dial(place, "beta", key, moving)           # raises Trouble
#     await ask(link, 7, 2 * segment_bytes(link), moving)     # raises asyncio.TimeoutError, OSError or ValueError
#
# A check opens a connection to a port that the kernel chose, as Gloo and NCCL do, and sends 64 KiB there and back: a
# firewall lets no connection through, and where a path takes smaller packets than its ends believe, only large ones
# vanish. Only what the network alone can do counts as cut. That somebody accepts a connection and says nothing is his
# kernel at work, and a supervisor that is stopped, starved or gone: of that the hub's lease is the judge.

CONNECT_S = 5.0
"""TCP asks again after 1 and 3 s (tcp(7), tcp_syn_retries)."""
PAIR_ANSWER_S = 8.0
FILTERED_S = 15.0
"""Before the start, so long may no connection come about. The other's kernel answers, whatever its processes do."""
SILENT_S = 25.0
"""The same for an answer, which takes a process that may be slow to wake."""
CHECK_BYTES = 1 << 15
CHECKS = 2
QUESTION_SEGMENTS = 2
"""With so many full segments, there and back, a way is asked while the job runs."""
BY_THE_NETWORK = {ECONNREFUSED, EHOSTUNREACH, ENETUNREACH, EHOSTDOWN, ETIMEDOUT, EACCES, EPERM}
"""How a connection fails that is not let through: a firewall may refuse, or let a router say so, or ours forbids it."""


class Place(NamedTuple):
    """Where a supervisor listens."""

    address: str
    port: int
    interface: str
    firewall: str
    """Which kind its host has (`firewall.kind`)."""


Kind = Literal["silent", "refused", "unreachable", "mute", "small only", "hung up"]
"""How a try fails: no answer to a connection, a refusal, word that there is no way; a connection whose other end says
nothing, over which large packets do not pass, or which is closed."""
_KINDS: dict[int, Kind] = {ECONNREFUSED: "refused", ETIMEDOUT: "silent"}


class Trouble(Exception):
    """One try failed. is_cut: by what only a network does. bear_s: so long that may go on before the start."""

    def __init__(self, kind: Kind, words: str, *, is_cut: bool, bear_s: float) -> None:
        super().__init__(words)
        self.kind, self.is_cut, self.bear_s = kind, is_cut, bear_s


async def dial(place: Place, name: str, key: bytes, moving: Callable[[], None]) -> Link:
    """A link that has passed the check. Raises Trouble. name: ours. key: of the one who listens there. moving: as for
    `ask`.
    """
    reader, writer = await connect(place)
    try:
        link = await introduce(reader, writer, name, key)
    except (OSError, ValueError, asyncio.TimeoutError) as error:
        raise Trouble("mute", "it accepts a connection and says nothing", is_cut=False, bear_s=SILENT_S) from error
    try:
        for number in range(CHECKS):
            await ask(link, number, CHECK_BYTES, moving)
    except asyncio.TimeoutError:
        link.close()
        words = "small packets pass and large ones do not: is the MTU too large somewhere on the way?"
        raise Trouble("small only", words, is_cut=True, bear_s=SILENT_S) from None
    except (OSError, ValueError) as error:
        link.close()
        raise Trouble("hung up", "it hung up", is_cut=False, bear_s=SILENT_S) from error
    return link


async def connect(place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises Trouble."""
    try:
        opened = asyncio.open_connection(place.address, place.port, limit=MAX_LINE)
        return await asyncio.wait_for(opened, CONNECT_S)
    except asyncio.TimeoutError:
        raise Trouble("silent", "no connection", is_cut=True, bear_s=FILTERED_S) from None
    except OSError as error:
        is_cut = error.errno in BY_THE_NETWORK
        words = os.strerror(error.errno).lower() if error.errno else str(error)
        kind = _KINDS.get(error.errno or 0, "unreachable")
        raise Trouble(kind, words, is_cut=is_cut, bear_s=FILTERED_S if is_cut else SILENT_S) from error


async def ask(link: Link, number: int, size: int, moving: Callable[[], None]) -> None:
    """Waits for the answer as long as packets come through, there or back: where many are lost, that takes its time.
    Raises asyncio.TimeoutError, OSError or ValueError. moving: called when they have.
    """
    link.send({"ask": number, "pad": "." * size})
    there, back = _passed_bytes(link)
    while True:
        try:
            answer = await link.receive(PAIR_ANSWER_S)
            break
        except asyncio.TimeoutError:
            now_there, now_back = _passed_bytes(link)
            if now_there - there + now_back - back < segment_bytes(link) // 2:
                raise
            there, back = now_there, now_back
            moving()
    if answer.get("answer") != number:
        raise ConnectionError("an answer to something else")


def answer(link: Link, question: dict[str, Any]) -> None:
    """What `ask` waits for, on the other side. Raises KeyError for what is no question of its kind."""
    link.send({"answer": question["ask"], "pad": question["pad"]})


def _passed_bytes(link: Link) -> tuple[int, int]:
    """Acknowledged by the other side, and received from it without a gap: tcpi_bytes_acked and tcpi_bytes_received of
    <linux/tcp.h>, Linux 4.1 or newer.
    """
    info = link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
    return struct.unpack_from("=QQ", info, 120) if len(info) >= 136 else (0, 0)


def segment_bytes(link: Link) -> int:
    """What TCP puts into one packet here."""
    size = link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    return min(int(size), CHECK_BYTES // QUESTION_SEGMENTS)
