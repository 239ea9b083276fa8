"""Checks of the links between hosts, and the conductor of the measurements. Pure but for the last part."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from orchestrator.doctor.observations import Host, Mesh, Observations, Pair, PairKind, RawFinding
from orchestrator.errors import HostError, ProbeError
from orchestrator.transport.ask import ConnectedHost, exchange, understood
from orchestrator.units import format_bandwidth, one_line

ENOUGH = 0.6
"""Share of the declared bandwidth. Assumed: a short transfer of one connection does not fill a link."""
MOST_JUDGED_BPS = 10e9
"""About the limit of one sending Python process."""
LONG_S = 0.02
"""A round trip within one building is at least ten times faster."""
_WORDS = {
    "silent": "no connection is made, and the address does not answer",
    "filtered": "no connection is made, but the address answers on another port",
    "refused": "the connection is refused, although the host listens there",
    "unreachable": "there is no route to that host",
    "mute": "another program or host accepts the connection",
    "hung up": "the connection breaks",
}


def listening(seen: Observations) -> Iterator[RawFinding]:
    remedy = "correct `address:` in the inventory (`ip -br addr` there lists its own)"
    for name, why in (seen.mesh.closed if seen.mesh else {}).items():
        yield RawFinding((name,), f"it cannot listen at its training address: {why}", remedy)


def to_master(seen: Observations) -> Iterator[RawFinding]:
    return (_sight(pair) for pair in _cut(seen) if pair.end == seen.master)


def to_others(seen: Observations) -> Iterator[RawFinding]:
    return (_sight(pair) for pair in _cut(seen) if pair.end != seen.master)


def _cut(seen: Observations) -> list[Pair]:
    return [pair for pair in seen.mesh.pairs if pair.kind in _WORDS] if seen.mesh else []


def _sight(pair: Pair) -> RawFinding:
    reason = f" ({pair.words})" if pair.words and pair.kind in ("unreachable", "refused") else ""
    if pair.kind in ("silent", "filtered", "refused", "unreachable") and pair.opens:
        remedy = f"is a firewall on {pair.end}? Open all TCP ports to the job's hosts there: `{pair.opens}`"
    else:
        remedy = (
            f"does another host have {pair.end}'s training address? `ip neigh` on {pair.start} shows which host answers"
        )
    return _of_way(pair, _WORDS[pair.kind] + reason, remedy)


def large_packets(seen: Observations) -> Iterator[RawFinding]:
    for pair in seen.mesh.pairs if seen.mesh else ():
        if pair.kind == "small only":
            words = "small packets pass, but large packets do not"
            remedy = "set the smallest MTU of the path on all hosts, as root: `ip link set IFACE mtu 1400`"
            yield _of_way(pair, words, remedy)


def speeds(seen: Observations) -> Iterator[RawFinding]:
    """If all links of a host are slow, and others are not, it reports the host instead of each link."""
    measured = [pair for pair in seen.open_pairs if pair.bits_per_s]
    slow = [pair for pair in measured if is_slow(pair, seen.host(pair.start), seen.host(pair.end))]
    remedy = "check cables, switch ports and other traffic on them, or correct `bandwidth:`"
    blamed = [host.name for host in seen.hosts if 1 < len(_at(host.name, slow)) == len(_at(host.name, measured))]
    blamed = blamed if len(slow) < len(measured) else []
    for name in blamed:
        own = _at(name, slow)
        most = format_bandwidth(max(pair.bits_per_s or 0 for pair in own))
        yield RawFinding((name,), f"at most {most} to or from it, with {_declared(seen, own[0])} declared", remedy)
    for pair in slow:
        if pair.start not in blamed and pair.end not in blamed:
            passed = format_bandwidth(pair.bits_per_s or 0)
            yield _of_way(pair, f"{passed} measured, with {_declared(seen, pair)} declared", remedy)


def is_slow(pair: Pair, start: Host, end: Host) -> bool:
    declared = declared_bps(start, end)
    return bool(declared and pair.bits_per_s and pair.bits_per_s < ENOUGH * min(declared, MOST_JUDGED_BPS))


def latencies(seen: Observations) -> Iterator[RawFinding]:
    for pair in seen.open_pairs:
        if pair.round_trip_s and pair.round_trip_s > LONG_S:
            words = f"a round trip takes {1000 * pair.round_trip_s:.1f} ms"
            yield _of_way(pair, words, "distant hosts train slowly: `orch plan` predicts how slowly")


def _at(name: str, pairs: list[Pair]) -> list[Pair]:
    return [pair for pair in pairs if name in (pair.start, pair.end)]


def _declared(seen: Observations, pair: Pair) -> str:
    return format_bandwidth(declared_bps(seen.host(pair.start), seen.host(pair.end)) or 0)


def declared_bps(start: Host, end: Host) -> float | None:
    """Declared bandwidth of the slower end."""
    known = [host.node.bandwidth_bps for host in (start, end) if host.node.bandwidth_bps]
    return min(known) if len(known) == 2 else None


def collective(seen: Observations) -> Iterator[RawFinding]:
    found = seen.collective
    if not found or not found.failure:
        return
    names = tuple(host.name for host in seen.hosts)
    logs = f"`orch logs --job {found.job}`" if found.job else "`orch up` again shows the host's error"
    how = {1: "works without that host", 2: "works if either is left out"}.get(len(found.guilty), "")
    words = f"an all-reduce by {found.backend} fails" + (f", but {how}" if how else "")
    if len(found.guilty) == 1:
        logs += f"; until it is repaired: `orch node release {found.guilty[0]}`"
    yield RawFinding(found.guilty or names, f"{words}: {found.failure}", logs, is_way=len(found.guilty) == 2)


def _of_way(pair: Pair, words: str, remedy: str) -> RawFinding:
    return RawFinding((pair.start, pair.end), words, remedy, is_way=True)


# Lets every host connect to every other in both directions, and coordinates them over SSH.
#
#     conductor = Conductor(hosts, show)
#     take_part(host, conductor, token, address)      # for each host at once, in its own thread
#     conductor.found().pairs
#
# All listen before any connects; then all connect at once; then pairs send in turn, so that no host is in two transfers
# at a time. `remote/mesh.py` is the hosts' side. A host that is late or disconnects is left out, and the others go on.

LIMIT_S = 60.0
"""Longest time that a host listens."""
LISTEN_S, REACH_S, SEND_S = 10.0, 30.0, 10.0
"""Per phase; later hosts are left out."""
TRANSFER_S, TRANSFERS_S = 0.3, 16.0
"""Per transfer, and for all transfers if that leaves each at least LEAST_S."""
LEAST_S = 0.15
MOST_AGAIN = 8
"""Links that seem slow are measured again, one at a time."""
SSH_PORT = 22
CROWD = 32
"""From more hosts on, only some links are tried: the cost of all of them grows with the square of the hosts."""


class Conductor:
    """Decides each host's next action from the hosts' messages. show: called at the start of each phase."""

    def __init__(
        self, hosts: Sequence[Host], show: Callable[[str], None] = lambda words: None, master: str | None = None
    ) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._links = links([*self._hosts], master)
        self._lines = {host.name: queue.SimpleQueue[bytes]() for host in hosts}
        self._show, self._lock = show, threading.Lock()
        self._present, self._awaited = {*self._hosts}, {*self._hosts}
        self._until_s = time.monotonic() + LISTEN_S
        self._places = dict[str, dict[str, Any]]()
        self._closed = dict[str, str]()
        self._pairs = dict[tuple[str, str], Pair]()
        self._slots: list[list[tuple[str, str]]] | None = None
        self._is_again = self._is_over = False
        self._seconds = TRANSFER_S

    def lines(self, name: str) -> Iterator[bytes]:
        """Orders to this host, each as soon as it is given."""
        while line := self._lines[name].get():
            yield line

    def found(self) -> Mesh:
        """Includes links that were not tried."""
        ways = sorted(self._links, key=lambda way: [*map([*self._hosts].index, way)])
        return Mesh(tuple(self._pairs.get(way) or Pair(*way, "not tried") for way in ways), dict(self._closed))

    def take(self, name: str, message: Mapping[str, Any]) -> None:
        """message: {} is a sign of life. Raises ValueError, TypeError, KeyError if it is malformed."""
        with self._lock:
            if "port" in message:
                self._places[name] = self._place(name, message)
            elif "closed" in message:
                self._closed[name] = one_line(message["closed"])
            elif "reached" in message:
                asked = {end for start, end in self._links if start == name}  # other names in the message are ignored
                ways = [(end, way) for end, way in message["reached"].items() if end in asked]
                self._pairs |= {(name, end): _pair(name, end, way) for end, way in ways}
            elif "sent" in message:
                self._take_speed((name, message["sent"]), message)
            elif message or time.monotonic() < self._until_s:
                return
            if message:
                self._awaited.discard(name)
            else:
                self._present -= self._awaited  # late hosts
                self._awaited = set()
            self._go_on()

    def left(self, name: str) -> None:
        """The host's connection is closed."""
        with self._lock:
            self._present.discard(name)
            self._awaited.discard(name)
            self._order(name, None)
            self._go_on()

    def _place(self, name: str, message: Mapping[str, Any]) -> dict[str, Any]:
        host, port = self._hosts[name], message["port"]
        if not isinstance(port, int) or not 0 < port < 1 << 16:
            raise ValueError("no port")
        link = host.facts.training_interface(host.node.interface, host.address)
        place = {"address": host.address, "port": port, "interface": link.name if link else "IFACE"}
        return {**place, "firewall": one_line(message["firewall"], 20), "ssh_port": host.node.port or SSH_PORT}

    def _take_speed(self, pair: tuple[str, str], message: Mapping[str, Any]) -> None:
        """Keeps the best figures: any disturbance makes a measurement worse."""
        known, trip_s, bits_per_s = self._pairs[pair], message["round_trip_s"], message["bits_per_s"]
        self._pairs[pair] = replace(
            known,
            round_trip_s=min(_figures(known.round_trip_s, trip_s), default=None),
            bits_per_s=max(_figures(known.bits_per_s, bits_per_s), default=None),
        )

    # ---- what comes next ---------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._awaited or self._is_over:
            return
        if self._slots is None:
            self._reach()
        elif self._slots:
            self._send(self._slots.pop(0))
        elif not self._is_again and (slow := self._slow()):
            self._is_again, self._slots = True, [[pair] for pair in slow[:MOST_AGAIN]]
            self._go_on()
        else:
            self._is_over = True
            for name in self._hosts:
                self._order(name, {"over": 1})
                self._order(name, None)

    def _reach(self) -> None:
        """All hosts connect; then prepares the slots."""
        names = [name for name in self._hosts if name in self._places and name in self._present]
        ways = [(start, end) for start, end in self._links if start in names and end in names]
        self._slots = slots(ways)
        self._seconds = max(LEAST_S, min(TRANSFER_S, TRANSFERS_S / max(1, len(self._slots))))
        self._slots = self._slots[: math.ceil(TRANSFERS_S / self._seconds)]
        self._show(f"connecting {len(ways)} pairs")
        self._await(names, REACH_S)
        for name in names:
            self._order(name, {"reach": {end: self._places[end] for start, end in ways if start == name}})
        if not names:
            self._go_on()

    def _send(self, pairs: Sequence[tuple[str, str]]) -> None:
        """pairs: of one slot, in which each host occurs once."""
        ready = [pair for pair in pairs if {*pair} <= self._present and self._is_open(pair)]
        self._show(f"measuring links, {len(self._slots or ())} rounds left")
        self._await([start for start, _ in ready], SEND_S)
        for start, end in ready:
            self._order(start, {"send": end, "seconds": self._seconds})
        if not ready:
            self._go_on()

    def _slow(self) -> list[tuple[str, str]]:
        return [place for place, pair in self._pairs.items() if is_slow(pair, *(self._hosts[name] for name in place))]

    def _is_open(self, pair: tuple[str, str]) -> bool:
        known = self._pairs.get(pair)
        return known is not None and known.kind == "open"

    def _await(self, names: Sequence[str], limit_s: float) -> None:
        self._awaited, self._until_s = {*names}, time.monotonic() + limit_s

    def _order(self, name: str, order: Mapping[str, Any] | None) -> None:
        """None: the last order was given."""
        self._lines[name].put(json.dumps(order).encode() + b"\n" if order else b"")


def links(names: Sequence[str], master: str | None = None) -> list[tuple[str, str]]:
    """Ordered pairs to try, in the order of a round-robin tournament: all, or of more than CROWD hosts those with the
    master and those 1, 2, 4, 8, ... hosts apart.
    """
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    place, found = {name: at for at, name in enumerate(names)}, list[tuple[str, str]]()
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if a and b]
        if len(names) > CROWD:
            pairs = [(a, b) for a, b in pairs if master in (a, b) or abs(place[a] - place[b]).bit_count() == 1]
        found += [*pairs, *((b, a) for a, b in pairs)]
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def slots(ways: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Each of them once, in slots without a repeated name; few slots in the order of `links`."""
    found, busy = list[list[tuple[str, str]]](), list[set[str]]()
    for way in ways:
        at = next((at for at, names in enumerate(busy) if names.isdisjoint(way)), len(found))
        if at == len(found):
            found.append([])
            busy.append(set())
        found[at].append(way)
        busy[at].update(way)
    return found


def take_part(host: ConnectedHost, conductor: Conductor, token: bytes, address: str) -> None:
    """Runs one host's part to its end. Raises HostError."""
    request = {"name": host.node, "address": address, "token": token.hex(), "limit_s": LIMIT_S}
    try:
        with exchange(host, "mesh", request, conductor.lines(host.node)) as messages:
            try:
                for message in messages:
                    if "end" in message:
                        return
                    understood(host.node, lambda message=message: conductor.take(host.node, message))  # type: ignore[misc]
            finally:
                conductor.left(host.node)
        raise ProbeError(host.node, "its answer was cut short", "try again")
    except HostError:
        conductor.left(host.node)
        raise


def _pair(start: str, end: Any, way: Mapping[str, Any]) -> Pair:
    if way["kind"] not in get_args(PairKind):
        raise ValueError("no kind of way")
    trip_s = way.get("round_trip_s")
    words, opens = (one_line(way.get(name, "")) for name in ("words", "opens"))
    return Pair(start, str(end), way["kind"], words, opens, None if trip_s is None else _figure(trip_s))


def _figures(*values: Any) -> list[float]:
    return [_figure(value) for value in values if value is not None]


def _figure(value: Any) -> float:
    if not isinstance(value, float | int) or not 0 < value < 1e15:
        raise ValueError("no figure")
    return float(value)
