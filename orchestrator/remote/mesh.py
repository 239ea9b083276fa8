"""The way from this host to every other one, tried in both directions before any job: for `orch doctor`.

Request: {"name", "address", "token": the same for all hosts, "limit_s"}. It reports (see `talk`):

    {"port": 41234, "firewall": "ufw"}   where it listens, on this address alone; {"closed": WORDS} where it cannot

Then each line of its input is something to do, and is answered by one word:

    {"reach": {NAME: PLACE}}             {"reached": {NAME: {"kind", "words", "opens", "round_trip_s"}}}
    {"send": NAME, "seconds": 0.3}       {"sent": NAME, "round_trip_s", "bits_per_s"}     null: no figure
    {"over": 1}                          {"end": {}}

A place is {"address", "port", "interface", "firewall", "ssh_port"}. kind is "open" or one of `way.Kind`; a silent way
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
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from . import firewall, way
from .link import Door, Link, greet_member, introduce
from .plain_asyncio import asyncio
from .talk import Talk, serve
from .way import Place, Trouble

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
                    way.answer(link, question)

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
        link = await way.dial(self._places[name], self._name, self._key(name), lambda: None)
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
            reader, writer = await way.connect(self._places[name])
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
    for number in range(way.CHECKS, way.CHECKS + ROUND_TRIPS):
        began = time.perf_counter()
        await way.ask(link, number, 0, lambda: None)
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
