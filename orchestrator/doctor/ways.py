"""What the ways between hosts are like: `seen -> sights`, one function a check. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.doctor.seen import Host, Pair, Seen, Sight
from orchestrator.units import format_bandwidth

ENOUGH = 0.6
"""Of the declared bandwidth. Assumed: a short transfer of one connection does not fill a link."""
MOST_JUDGED_BPS = 10e9
"""One Python process does not send faster than about this, whatever the link."""
LONG_S = 0.02
"""A round trip within one building takes less, by ten times and more."""
_WORDS = {
    "silent": "no connection comes about, and nothing at that address answers",
    "filtered": "no connection comes about, though that address answers on another port",
    "refused": "the connection is refused, though it listens there",
    "unreachable": "there is no route to that host",
    "mute": "somebody accepts the connection who is not that host",
    "hung up": "the connection breaks",
}


def listening(seen: Seen) -> Iterator[Sight]:
    remedy = "correct `address:` in the inventory (`ip -br addr` there lists its own)"
    for name, why in (seen.mesh.closed if seen.mesh else {}).items():
        yield Sight((name,), f"it cannot listen at its training address: {why}", remedy)


def to_master(seen: Seen) -> Iterator[Sight]:
    return (_sight(pair) for pair in _cut(seen) if pair.end == seen.master)


def to_others(seen: Seen) -> Iterator[Sight]:
    return (_sight(pair) for pair in _cut(seen) if pair.end != seen.master)


def _cut(seen: Seen) -> list[Pair]:
    return [pair for pair in seen.mesh.pairs if pair.kind in _WORDS] if seen.mesh else []


def _sight(pair: Pair) -> Sight:
    said = f" ({pair.words})" if pair.words and pair.kind in ("unreachable", "refused") else ""
    if pair.kind in ("silent", "filtered", "refused", "unreachable") and pair.opens:
        remedy = f"is a firewall on {pair.end}? Open all TCP ports to the job's hosts there: `{pair.opens}`"
    else:
        remedy = f"is {pair.end}'s training address its own alone? `ip neigh` on {pair.start} shows who answers"
    return _of_way(pair, _WORDS[pair.kind] + said, remedy)


def large_packets(seen: Seen) -> Iterator[Sight]:
    for pair in seen.mesh.pairs if seen.mesh else ():
        if pair.kind == "small only":
            words = "small packets pass and large ones do not"
            remedy = "give all hosts the smallest MTU on the way: `ip link set IFACE mtu 1400` there, as root"
            yield _of_way(pair, words, remedy)


def speeds(seen: Seen) -> Iterator[Sight]:
    """Where all ways from and to a host are slow, and others are not, the host is named and not each way."""
    measured = [pair for pair in seen.open_pairs if pair.bits_per_s]
    slow = [pair for pair in measured if is_slow(pair, seen.host(pair.start), seen.host(pair.end))]
    remedy = "look at cables, switch ports and what else uses them; or correct `bandwidth:`"
    blamed = [host.name for host in seen.hosts if 1 < len(_at(host.name, slow)) == len(_at(host.name, measured))]
    blamed = blamed if len(slow) < len(measured) else []
    for name in blamed:
        own = _at(name, slow)
        most = format_bandwidth(max(pair.bits_per_s or 0 for pair in own))
        yield Sight((name,), f"no more than {most} passes from or to it, of {_declared(seen, own[0])} declared", remedy)
    for pair in slow:
        if pair.start not in blamed and pair.end not in blamed:
            passed = format_bandwidth(pair.bits_per_s or 0)
            yield _of_way(pair, f"{passed} passed, of {_declared(seen, pair)} declared", remedy)


def is_slow(pair: Pair, start: Host, end: Host) -> bool:
    declared = declared_bps(start, end)
    return bool(declared and pair.bits_per_s and pair.bits_per_s < ENOUGH * min(declared, MOST_JUDGED_BPS))


def latencies(seen: Seen) -> Iterator[Sight]:
    for pair in seen.open_pairs:
        if pair.round_trip_s and pair.round_trip_s > LONG_S:
            words = f"a round trip takes {1000 * pair.round_trip_s:.1f} ms"
            yield _of_way(pair, words, "hosts far from each other train slowly: `orch plan` says how slowly")


def _at(name: str, pairs: list[Pair]) -> list[Pair]:
    return [pair for pair in pairs if name in (pair.start, pair.end)]


def _declared(seen: Seen, pair: Pair) -> str:
    return format_bandwidth(declared_bps(seen.host(pair.start), seen.host(pair.end)) or 0)


def declared_bps(start: Host, end: Host) -> float | None:
    """What the slower of both ends is said to have."""
    known = [host.node.bandwidth_bps for host in (start, end) if host.node.bandwidth_bps]
    return min(known) if len(known) == 2 else None


def collective(seen: Seen) -> Iterator[Sight]:
    found = seen.collective
    if not found or not found.failure:
        return
    everybody = tuple(host.name for host in seen.hosts)
    logs = f"`orch logs --job {found.job}`" if found.job else "`orch up` again shows what the host says"
    how = {1: "not without that host", 2: "not without either of them"}.get(len(found.guilty), "")
    words = f"an all-reduce by {found.backend} fails" + (f", and {how}" if how else "")
    if len(found.guilty) == 1:
        logs += f"; until it is mended: `orch node release {found.guilty[0]}`"
    yield Sight(found.guilty or everybody, f"{words}: {found.failure}", logs, is_way=len(found.guilty) == 2)


def _of_way(pair: Pair, words: str, remedy: str) -> Sight:
    return Sight((pair.start, pair.end), words, remedy, is_way=True)
