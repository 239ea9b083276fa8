"""A member's end of what the supervisors of a job say to each other (`hub`): it stays connected to the master's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

from .link import Link, join_hub
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
