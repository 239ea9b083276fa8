"""The master host's side of a job: collects all hosts' statuses, decides (`verdict`) and sends one order to all.

coordinator = Coordinator(node, token, state, peers, takes_part, obey, earlier)
port = await coordinator.listen(None)
coordinator.open(JOIN_S)            # after `go`
coordinator.meet()                  # after the job's turn in the queue
coordinator.decide()                # after every change
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

from . import attempts, membership, verdict
from .host_state import HostState
from .link import Link, Listener, asyncio, greet_member
from .membership import QUIET_S, Peers
from .messages import STILL_QUEUED, Earlier, Failure, Order, Status, failure
from .ports import Rendezvous
from .programs import KILL_S, until
from .turn import Turn

JOIN_S = 30.0
REPORT_S = 2.0  # how long to wait, after a connection broke, for the host's own report of the reason
TURN_S = 1.0
"""Between two decisions on a queued job: statuses become too old without any event."""


def ladder_s(node: dict[str, Any]) -> float:
    """The longest time from a stop to the end of all ranks."""
    return float(REPORT_S + 2 * node["grace_s"] + 2 * KILL_S)


class Coordinator:
    """takes_part: False if this host is not in the job; then nothing is decided. obey: called with each new order."""

    def __init__(
        self,
        node: dict[str, Any],
        token: bytes,
        state: HostState,
        peers: Peers,
        takes_part: Callable[[], bool],
        obey: Callable[[Order], None],
        earlier: Sequence[Earlier] = (),
    ) -> None:
        self.order: Order = {"do": "wait"}
        self.rendezvous = Rendezvous(node["address"], node["rendezvous_port"])
        self._node, self._state, self._peers = node, state, peers
        self._takes_part, self._obey = takes_part, obey
        members = {name for name in node["members"] if name != node["name"]}
        self._hub = Hub(members, token, lambda: self.order, self.decide, node["silence_s"])
        self._arrivals: dict[tuple[str, str, int | None], int] = {}
        self._earlier = earlier
        self._turn = Turn() if node.get("queue") else None
        self._turn_until_s: float | None = None

    async def listen(self, door: socket.socket | None) -> int:
        """door: a listening socket to use."""
        return await self._hub.listen(self._node["address"], door)

    def open(self, join_s: float) -> None:
        """join_s: for all hosts to reach this one."""
        if self._peers.places:
            self._hub.expect(join_s, self._peers.remedy(self._node["name"]))

    def meet(self) -> None:
        if port := self._claim_port():
            self.order = {**self.order, "do": "wait", "rendezvous_port": port}
            self._hub.announce()
            if self._peers.places:
                self._peers.open_rendezvous(self.rendezvous.listen())

    def dropped(self) -> dict[str, dict[str, int]]:
        return {node: status["dropped"] for node, status in self._hub.statuses.items() if "dropped" in status}

    async def close(self) -> None:
        # Waits for the other hosts, which leave only after their ranks have ended.
        self._hub.announce()
        await until(lambda: self._hub.connected == 0, self._ladder_s)
        self._hub.close()

    # ---- deciding ---------------------------------------------------------------------------------------------

    def decide(self, settled: bool = False) -> None:
        """settled: the time for late reports after a stop is over."""
        if self.order["do"] == "finish" or not self._takes_part():
            return
        order = self._verdict(self._statuses(), settled)
        if order["do"] == "wait":
            order = self._order_to_wait()
        if order["do"] == "finish" and order["state"] == "failed" and self._is_retried(order.get("first_failure")):
            order["is_retried"] = True
        if order["do"] == "start":
            port = self._port_of()
            if port is None:
                return  # the failed port has been decided on already
            order["rendezvous_port"] = port
        if order["do"] == "stop" and self.order["do"] != "stop":
            asyncio.get_running_loop().call_later(self._ladder_s, self.decide, True)
        if order != self.order:
            before, self.order = self.order, order
            if before["do"] == "queue" != order["do"]:
                self._hub.expect_word()
            self._hub.announce()
            self._obey(order)

    def _order_to_wait(self) -> Order:
        if self._turn and self._state.phase == "queued":
            self._refuse_late()
            own, now_s = self._node["name"], asyncio.get_running_loop().time()
            statuses = {node: self._hub.fresh(node) for node in self._node["members"]}
            if order := self._turn.order({**statuses, own: self._state.status()}, now_s):
                return order
            claim, self._turn = self._turn.claim, None
            return {"do": "wait", "turn": claim}
        kept: Order = {"do": "wait"}
        if "turn" in self.order:
            kept["turn"] = self.order["turn"]
        if "rendezvous_port" in self.order:
            kept["rendezvous_port"] = self.order["rendezvous_port"]
        return kept

    def _refuse_late(self) -> None:
        limit_s = self._node["queue"]["limit_s"]
        if limit_s and self._turn_until_s is None:
            self._turn_until_s = asyncio.get_running_loop().time() + limit_s
        elif limit_s and self._turn_until_s and asyncio.get_running_loop().time() > self._turn_until_s:
            self._turn_until_s = None
            late = failure("queue", self._node["name"], f"it was still queued after {limit_s:g} s (--wait-limit)")
            asyncio.get_running_loop().call_soon(self._state.fail, late)

    async def watch_turn(self) -> None:
        while self._turn and self.order["do"] in ("wait", "queue"):
            self.decide()
            await asyncio.sleep(TURN_S)

    def _is_retried(self, cause: Failure | None) -> bool:
        goes_on = attempts.goes_on(self._node, self._earlier, cause)
        return goes_on and not any(status.get("is_last") for status in self._statuses().values())

    def _statuses(self) -> dict[str, Status]:
        statuses = {name: self._hub.statuses.get(name, Status()) for name in self._node["members"]}
        statuses[self._node["name"]] = self._state.status()
        for status in statuses.values():
            for one in status.get("failures", ()):
                one.setdefault("order", self._arrival(one))
        return statuses

    def _arrival(self, one: Failure) -> int:
        key = (one["node"], one["kind"], one["rank"])
        return self._arrivals.setdefault(key, len(self._arrivals))

    def _verdict(self, statuses: dict[str, Status], settled: bool) -> Order:
        if self.order["do"] in ("wait", "start"):
            for node, why in verdict.severed(statuses, self._hub.lost).items():
                self._hub.lost.setdefault(node, why)
        return verdict.decide(statuses, self._lost(), settled)

    def _lost(self) -> dict[str, str]:
        if not self._hub.lost or not self._hub.is_cut_off:
            return self._hub.lost
        silence_s = self._node["silence_s"]
        why = f"no word from any other host for {silence_s:.0f} s: this host was cut off, or all of them went down"
        return dict.fromkeys((self._node["name"], *self._node["members"]), why)

    # ---- where the ranks meet ---------------------------------------------------------------------------------

    def _port_of(self) -> int | None:
        if self.order["do"] == "start":
            return self.order["rendezvous_port"]
        self._peers.close_rendezvous()
        port = self.rendezvous.port
        if port is not None:
            self.rendezvous.admit(self._hub.addresses.values())
        return port

    def _claim_port(self) -> int | None:
        try:
            return self.rendezvous.claim()
        except OSError as error:
            self._state.fail(failure("port", self._node["name"], f"no port to meet at: {error}"))
            return None

    @property
    def _ladder_s(self) -> float:
        return ladder_s(self._node)


# Each message carries the sender's whole present state and is sent on every change and every BEAT_S (`membership`), so
# that a broken connection loses nothing:
#
#     member -> hub   {"phase": "joined", "failures": [], ...}
#     hub -> member   {"do": "start", "rendezvous_port": 29500, ...}


class Hub:
    """Keeps the latest status of every member, and lost members.

    changed: called after every new status and every loss. `order` is sent on every beat and by `announce`.
    """

    def __init__(
        self,
        members: set[str],
        token: bytes,
        order: Callable[[], Order],
        changed: Callable[[], None],
        silence_s: float | None = None,
    ) -> None:
        self._silence_s = silence_s or membership.LEASE_S
        self.statuses: dict[str, Status] = {}
        self.lost: dict[str, str] = {}
        self.addresses: dict[str, str] = {}  # each member's latest address
        self._members, self._token, self._order, self._changed = members, token, order, changed
        self._links: dict[str, Link] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._received_at: dict[str, float] = {}
        self._listener = Listener(self._serve)
        self._place = ""
        self._beats: asyncio.Task[None] | None = None

    async def listen(self, address: str, door: socket.socket | None = None) -> int:
        port = self._listener.open_at(door.dup()) if door else await self._listener.open(address)
        self._place = f"{address} port {port}"
        self._beats = asyncio.create_task(self._beat())
        return port

    def expect(self, within_s: float, remedy: str) -> None:
        why = f"did not reach the master at {self._place} within {within_s:.0f} s: {remedy}"
        for node in self._members - self._links.keys():
            self._set_deadline(node, within_s, why)

    def expect_word(self) -> None:
        """Begins the lease of each connected host anew: it is shorter when the job is no longer queued."""
        for node in self._deadlines.keys() & self._links.keys():
            self._renew_lease(node)

    def announce(self) -> None:
        for link in self._links.values():
            link.send(self._order())

    def fresh(self, node: str) -> Status | None:
        """Its status, unless that is old."""
        now_s = asyncio.get_running_loop().time()
        return self.statuses.get(node) if now_s - self._received_at.get(node, -QUIET_S) < QUIET_S else None

    @property
    def _lease_s(self) -> float:
        return membership.lease_s(self._order(), self._silence_s)

    @property
    def connected(self) -> int:
        return len(self._links)

    @property
    def is_cut_off(self) -> bool:
        # All of several hosts fell silent at once: it is more likely that this host is unreachable.
        since = asyncio.get_running_loop().time() - (self._silence_s - 2 * membership.BEAT_S)
        return len(self._members) > 1 and all(self._received_at.get(node, since + 1) < since for node in self._members)

    def close(self) -> None:
        if self._beats:
            self._beats.cancel()
        self._listener.close()
        for deadline in self._deadlines.values():
            deadline.cancel()
        for link in self._links.values():
            link.close()

    async def _beat(self) -> None:
        while True:
            self.announce()
            await asyncio.sleep(membership.BEAT_S)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, known: Callable[[], None]
    ) -> None:
        # An error of an unauthenticated peer ends only its connection.
        node, link = await greet_member(reader, writer, self._token)
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
                status = cast(Status, await link.receive(self._lease_s))
                self._received(node, status)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            self._broken(node, link, silent=isinstance(error, asyncio.TimeoutError))

    def _received(self, node: str, status: Status) -> None:
        self._received_at[node] = asyncio.get_running_loop().time()
        self._renew_lease(node)
        if self.statuses.get(node) != status:
            self.statuses[node] = status
            self._changed()

    def _renew_lease(self, node: str) -> None:
        lease_s = self._lease_s
        self._set_deadline(node, lease_s, f"no word for {lease_s:.0f} s: host down, frozen or cut off")

    def _broken(self, node: str, link: Link, silent: bool) -> None:
        link.close()
        if self._links.get(node) is not link:
            return  # it has already reconnected
        del self._links[node]
        if self.statuses.get(node, {}).get("phase") == "ended":
            if node in self._deadlines:
                self._deadlines.pop(node).cancel()
            self._changed()
        elif not silent:
            self._set_deadline(node, membership.BROKEN_S, "its supervisor is gone: killed, or the host went down")

    def _set_deadline(self, node: str, within_s: float, why: str) -> None:
        if node in self._deadlines:
            self._deadlines[node].cancel()
        self._deadlines[node] = asyncio.get_running_loop().call_later(within_s, self._lose, node, why)

    def _lose(self, node: str, why: str) -> None:
        why += STILL_QUEUED if self.statuses.get(node, {}).get("phase") == "queued" else ""
        self.lost.setdefault(node, why)
        self._changed()
