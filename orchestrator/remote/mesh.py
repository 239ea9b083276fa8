"""Checks connections between hosts: for `orch doctor` before any job, and for supervisors (`membership`).

Request: {"name", "address", "token": one for all hosts, "limit_s"}. First output (see `progress_stream`):

    {"port": 41234, "firewall": "ufw"}   it listens on this address; {"closed": WHY} if it cannot

Each further line of input is a task with one answer:

    {"reach": {NAME: PLACE}}             {"reached": {NAME: {"kind", "words", "opens", "round_trip_s"}}}
    {"send": NAME, "seconds": 0.3}       {"sent": NAME, "round_trip_s", "bits_per_s"}     null: not measured
    {"over": 1}                          {"end": {}}

A place is {"address", "port", "interface", "firewall", "ssh_port"}. kind: "open" or one of `Kind`; "filtered" is silent
although another port of that host answers. opens: a command for the other host's firewall. Peers authenticate with the
token (`link`). The program ends with its input, its connection, or after limit_s.

    link = await dial(place, "beta", key, moving)           # raises Trouble
    await ask(link, 7, 2 * segment_bytes(link), moving)     # raises asyncio.TimeoutError, OSError or ValueError

A check uses a port chosen by the kernel, as Gloo and NCCL do, and sends 64 KiB there and back: a firewall blocks the
connection, a wrong MTU loses only large packets. Only failures that a network causes count as cut; a connection without
answers may be a stopped or starved process, which the hub's lease detects.
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
from .link import MAX_LINE, Link, Listener, asyncio, greet_member, introduce
from .progress_stream import ProgressStream, serve

MOST_S = 60.0
ROUND_TRIPS = 11
KNOCK_S = 2.0
TRIES = 2
AT_ONCE = 16
BLOCK = bytes(1 << 18)
RAMP = 0.3  # fraction of a transfer before measuring: TCP starts slowly, and a traffic shaper lets a burst through
ANSWER_S = 15.0


def main(request: dict[str, Any]) -> None:
    limit = threading.Timer(min(MOST_S, request["limit_s"]), os._exit, [0])
    limit.daemon = True
    limit.start()
    serve(request, lambda request, progress: asyncio.run(take_part(request, progress)))


async def take_part(request: dict[str, Any], progress: ProgressStream) -> dict[str, Any]:
    mesh = Mesh(request["name"], request["address"], bytes.fromhex(request["token"]))
    try:
        progress.send({"port": await mesh.listen(), "firewall": firewall.kind()})
    except OSError as error:
        progress.send({"closed": f"{error.strerror or error} ({request['address']})"})
        return {}
    lines = orders()
    while order := await lines.get():
        if "reach" in order:
            progress.send({"reached": await mesh.reach(order["reach"])})
        elif "send" in order:
            progress.send({"sent": order["send"], **await mesh.send(order["send"], order["seconds"])})
    return {}


def orders() -> asyncio.Queue[dict[str, Any]]:
    # Lines of our input; {} is the last. Read in a thread: our request came through the same buffer.
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
        self._listener = Listener(self._serve)
        self._places: dict[str, Place] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def listen(self) -> int:
        return await self._listener.open(self._address)

    def close(self) -> None:
        self._listener.close()

    def _key(self, listener: str) -> bytes:
        return hmac.new(self._token, f"mesh {listener}".encode(), hashlib.sha256).digest()

    # ---- answering --------------------------------------------------------------------------------------------

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, known: Callable[[], None]
    ) -> None:
        _, link = await greet_member(reader, writer, self._key(self._name))
        known()
        with contextlib.suppress(OSError, ValueError, KeyError, asyncio.TimeoutError):  # it left, or its link failed
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
                        continue  # a process may be slow to wake
                    place = self._places[name]
                    is_there = trouble.kind == "silent" and await answers(place.address, ssh_port)
                    kind = "filtered" if is_there else trouble.kind
                    return {"kind": kind, "words": str(trouble), "opens": self._opening(place)}
        raise AssertionError

    def _opening(self, place: Place) -> str:
        sources = [self._address, *(other.address for other in self._places.values())]
        return firewall.opening(place.firewall, place.interface, sources)

    async def _try(self, name: str) -> dict[str, Any]:
        link = await dial(self._places[name], self._name, self._key(name), lambda: None)
        try:
            return {"kind": "open", "words": "", "round_trip_s": await round_trip_s(link)}
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            raise Trouble("hung up", "it hung up", is_cut=False, bear_s=0.0) from error
        finally:
            link.close()

    async def send(self, name: str, seconds: float) -> dict[str, float | None]:
        """Round trip on an idle connection, then the rate that the other side measured during this time."""
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
    """Bits per second until the end of the stream; None if nothing came after the ramp."""
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
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), KNOCK_S)
        writer.close()
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    return True


CONNECT_S = 5.0  # TCP retries after 1 and 3 s (tcp(7), tcp_syn_retries)
PAIR_ANSWER_S = 8.0
FILTERED_S = 15.0
"""Longest time without a connection before the start. The other kernel answers even if its processes do not."""
SILENT_S = 25.0  # longest time without an answer, which needs a process that may be slow to wake
CHECK_BYTES = 1 << 15
CHECKS = 2
QUESTION_SEGMENTS = 2  # full segments, there and back, per check while the job runs
BY_THE_NETWORK = {ECONNREFUSED, EHOSTUNREACH, ENETUNREACH, EHOSTDOWN, ETIMEDOUT, EACCES, EPERM}
"""Errors of a blocked connection: a firewall or a router refuses it, or our own firewall forbids it."""


class Place(NamedTuple):
    address: str
    port: int
    interface: str
    firewall: str  # its host's kind (`firewall.kind`)


Kind = Literal["silent", "refused", "unreachable", "mute", "small only", "hung up"]
"""Results of a failed check: no answer to a connection, refused, no route; connected but without an answer, with only
small packets passing, or closed.
"""
_KINDS: dict[int, Kind] = {ECONNREFUSED: "refused", ETIMEDOUT: "silent"}


class Trouble(Exception):
    """One check failed. is_cut: a network error. bear_s: how long to retry before the start."""

    def __init__(self, kind: Kind, words: str, *, is_cut: bool, bear_s: float) -> None:
        super().__init__(words)
        self.kind, self.is_cut, self.bear_s = kind, is_cut, bear_s


async def dial(place: Place, name: str, key: bytes, moving: Callable[[], None]) -> Link:
    """A checked link. Raises Trouble. name: ours. key: of the listening host. moving: as for `ask`."""
    reader, writer = await connect(place)
    try:
        link = await introduce(reader, writer, name, key)
    except (OSError, ValueError, asyncio.TimeoutError) as error:
        raise Trouble("mute", "it accepts a connection and sends nothing", is_cut=False, bear_s=SILENT_S) from error
    try:
        for number in range(CHECKS):
            await ask(link, number, CHECK_BYTES, moving)
    except asyncio.TimeoutError:
        link.close()
        words = "small packets pass, but large packets do not: is the MTU too large somewhere on the way?"
        raise Trouble("small only", words, is_cut=True, bear_s=SILENT_S) from None
    except (OSError, ValueError) as error:
        link.close()
        raise Trouble("hung up", "it hung up", is_cut=False, bear_s=SILENT_S) from error
    return link


async def connect(place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
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
    """Waits for the answer as long as packets pass in either direction, which a lossy network slows down. Raises
    asyncio.TimeoutError, OSError or ValueError. moving: called when packets have passed.
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
    link.send({"answer": question["ask"], "pad": question["pad"]})


def _passed_bytes(link: Link) -> tuple[int, int]:
    # Acknowledged, and received without a gap: tcpi_bytes_acked and tcpi_bytes_received of <linux/tcp.h>, Linux 4.1+.
    info = link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
    return struct.unpack_from("=QQ", info, 120) if len(info) >= 136 else (0, 0)


def segment_bytes(link: Link) -> int:
    size = link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    return min(int(size), CHECK_BYTES // QUESTION_SEGMENTS)
