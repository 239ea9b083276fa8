"""A member's end of what the supervisors of a job say to each other (`hub`): it stays connected to the master's."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from . import lease
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
                    self._deadline = min(self._deadline, refused + lease.BROKEN_S)
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
        return f"no word from the master for {lease.LEASE_S:.0f} s: it is down, frozen or cut off"

    async def _talk(self, link: Link) -> None:
        beats = asyncio.create_task(self._beat())
        try:
            while not self._closed:
                order = cast(Order, await link.receive(lease.QUIET_S))
                self._heard, self._deadline = True, asyncio.get_running_loop().time() + lease.LEASE_S
                self._hang_up(self._silent)
                self._silent = None
                self._obey(order)
        finally:
            beats.cancel()

    async def _beat(self) -> None:
        while True:
            self.announce()
            await asyncio.sleep(lease.BEAT_S)

    def _set_aside(self) -> None:
        """Keeps the silent connection open until another one speaks: the hub would take its closing for our end."""
        if self._link:
            self._hang_up(self._silent)
            self._silent, self._link = self._link, None

    @staticmethod
    def _hang_up(*links: Link | None) -> None:
        for link in filter(None, links):
            link.close()
