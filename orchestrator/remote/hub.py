"""The master's end of what the supervisors of a job say to each other: every member's latest status, and who is gone.

Every message is the sender's whole present state, sent on every change and every BEAT_S (`lease`): nothing is lost with
a broken connection, because the next message says it all. A member (`membership`) sends its `status`, the hub sends its
`order` (`messages`), over a `link`.

    member -> hub   {"phase": "joined", "failures": [], ...}
    hub -> member   {"do": "start", "rendezvous_port": 29500, ...}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from . import lease
from .door import Door
from .link import Link, greet_member
from .messages import Order, Status
from .plain_asyncio import asyncio


class Hub:
    """The master's end: keeps the latest status of every member and who is gone.

    changed is called after every new status and every loss; `order` is sent on every beat and by `announce`.
    """

    def __init__(
        self, members: set[str], token: bytes, order: Callable[[], Order], changed: Callable[[], None]
    ) -> None:
        self.statuses: dict[str, Status] = {}
        self.lost: dict[str, str] = {}
        self.addresses: dict[str, str] = {}
        """Where each member was last heard from."""
        self._members, self._token, self._order, self._changed = members, token, order, changed
        self._links: dict[str, Link] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._heard_at: dict[str, float] = {}
        self._door = Door(self._serve)
        self._place = ""
        self._beats: asyncio.Task[None] | None = None

    async def listen(self, address: str) -> int:
        """Binds a free port on the training address; returns it."""
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

    @property
    def connected(self) -> int:
        return len(self._links)

    @property
    def is_cut_off(self) -> bool:
        """Whether all of several hosts fell silent at once: then it is rather we who cannot be reached."""
        since = asyncio.get_running_loop().time() - (lease.LEASE_S - 2 * lease.BEAT_S)
        return len(self._members) > 1 and all(self._heard_at.get(node, since + 1) < since for node in self._members)

    def close(self) -> None:
        if self._beats:
            self._beats.cancel()
        self._door.close()
        for deadline in self._deadlines.values():
            deadline.cancel()
        for link in self._links.values():
            link.close()

    async def _beat(self) -> None:
        while True:
            self.announce()
            await asyncio.sleep(lease.BEAT_S)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, known: Callable[[], None]
    ) -> None:
        node, link = await greet_member(reader, writer, self._token)  # what a stranger says ends no more than its visit
        known()
        if node not in self._members:
            return
        previous = self._links.get(node)
        if previous:
            previous.close()
        self._links[node] = link
        self.addresses[node] = str(writer.get_extra_info("peername")[0])
        link.send(self._order())
        try:
            while True:
                status = cast(Status, await link.receive(lease.LEASE_S))
                self._heard(node, status)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            self._broken(node, link, silent=isinstance(error, asyncio.TimeoutError))

    def _heard(self, node: str, status: Status) -> None:
        self._heard_at[node] = asyncio.get_running_loop().time()
        self._set_deadline(node, lease.LEASE_S, f"no word for {lease.LEASE_S:.0f} s: host down, frozen or cut off")
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
            self._set_deadline(node, lease.BROKEN_S, "its supervisor is gone: killed, or the host went down")

    def _set_deadline(self, node: str, within_s: float, why: str) -> None:
        if node in self._deadlines:
            self._deadlines[node].cancel()
        self._deadlines[node] = asyncio.get_running_loop().call_later(within_s, self._lose, node, why)

    def _lose(self, node: str, why: str) -> None:
        self.lost.setdefault(node, why)
        self._changed()
