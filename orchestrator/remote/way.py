"""The way to one other host's supervisor: dialled, checked, and asked whether it still passes what it should.

    link = await dial(place, "beta", key, moving)           # raises Trouble
    await ask(link, 7, 2 * segment_bytes(link), moving)     # raises asyncio.TimeoutError, OSError or ValueError

A check opens a connection to a port that the kernel chose, as Gloo and NCCL do, and sends 64 KiB there and back: a
firewall lets no connection through, and where a path takes smaller packets than its ends believe, only large ones
vanish. Only what the network alone can do counts as cut. That somebody accepts a connection and says nothing is his
kernel at work, and a supervisor that is stopped, starved or gone: of that the hub's lease is the judge.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from errno import EACCES, ECONNREFUSED, EHOSTDOWN, EHOSTUNREACH, ENETUNREACH, EPERM, ETIMEDOUT
from typing import Any, Literal, NamedTuple

from .link import MAX_LINE, Link, introduce
from .plain_asyncio import asyncio

CONNECT_S = 5.0
"""TCP asks again after 1 and 3 s (tcp(7), tcp_syn_retries)."""
ANSWER_S = 8.0
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
            answer = await link.receive(ANSWER_S)
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
