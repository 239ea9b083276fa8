"""Hosts that check and watch each other, over real sockets on the loopback, their times shortened."""

import asyncio
import socket

import pytest

from orchestrator.remote import membership as wire
from orchestrator.remote import mesh
from orchestrator.remote.membership import Peers, Unreached
from orchestrator.remote.mesh import Place

TOKEN = b"t" * 32
SOON_S = 20.0


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    for name, seconds in {"PEER_BEAT_S": 0.05, "PAUSE_S": 0.05, "CUT_S": 1.0}.items():
        monkeypatch.setattr(wire, name, seconds)
    for name, seconds in {"CONNECT_S": 0.5, "PAIR_ANSWER_S": 0.5, "FILTERED_S": 0.5, "SILENT_S": 1.0}.items():
        monkeypatch.setattr(mesh, name, seconds)


class Ring:
    """Peers by name, each listening; `ways` puts another port in the way to a host."""

    def __init__(self, names="abc"):
        self.changes = asyncio.Event()
        self.of = {name: Peers(name, TOKEN, self.changes.set) for name in names}

    async def __aenter__(self):
        self.ports = {name: await one.listen("127.0.0.1") for name, one in self.of.items()}
        for one in self.of.values():
            one.places = {name: Place("127.0.0.1", port, "lo", "ufw") for name, port in self.ports.items()}
        return self

    async def __aexit__(self, *_):
        for one in self.of.values():
            one.close()

    def lead(self, start, end, port):
        """The way from one host to another leads to this port."""
        self.of[start].places[end] = self.of[start].places[end]._replace(port=port)

    async def until(self, condition):
        async def wait():
            while not condition():
                self.changes.clear()
                await self.changes.wait()

        await asyncio.wait_for(wait(), SOON_S)


def run(test, names="abc"):
    async def inside():
        async with Ring(names) as ring:
            await test(ring)

    asyncio.run(inside())


async def unreached(peers):
    with pytest.raises(Unreached) as found:
        await asyncio.wait_for(peers.reach(), SOON_S)
    return found.value


def test_hosts_that_reach_each_other_say_nothing_however_long_they_watch():
    async def test(ring):
        await asyncio.gather(*(one.reach() for one in ring.of.values()))
        for one in ring.of.values():
            one.watch()
        await asyncio.sleep(3 * wire.CUT_S)  # the time that must not strike
        assert [one.cut for one in ring.of.values()] == [{}, {}, {}]

    run(test)


def test_alone_there_is_nobody_to_reach():
    async def test(ring):
        await ring.of["a"].reach()
        ring.of["a"].watch()

    run(test, "a")


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 33])
def test_every_pair_is_watched_up_to_33_hosts_and_each_host_has_few_to_watch(count):
    names = [f"n{number}" for number in range(count)]
    place = Place("127.0.0.1", 1, "lo", "ufw")
    pairs = set()
    for name in names:
        one = Peers(name, TOKEN, lambda: None)
        one.places = dict.fromkeys(names, place)
        assert len(one._watched()) <= wire.NEIGHBOURS
        pairs |= {frozenset((name, other)) for other in one._watched()}
    assert len(pairs) == count * (count - 1) // 2


async def small_only(reader, writer, port):
    """Carries what comes in small pieces, and swallows the rest of a connection from its first large one on."""
    there = await asyncio.open_connection("127.0.0.1", port)

    async def carry(source, sink):
        while 0 < len(data := await source.read(1 << 16)) < 1000:
            sink.write(data)
        await asyncio.sleep(SOON_S)

    try:
        await asyncio.gather(carry(reader, there[1]), carry(there[0], writer))
    finally:
        writer.close()
        there[1].close()


def nobody():
    """A port where nobody listens, kept."""
    kept = socket.socket()
    kept.bind(("127.0.0.1", 0))
    return kept


def full():
    """A port whose queue is full: the kernel drops every further request to connect, as a firewall does."""
    kept = socket.socket()
    kept.bind(("127.0.0.1", 0))
    kept.listen(0)
    guest = socket.create_connection(kept.getsockname())
    return kept, guest


def test_a_port_that_lets_nothing_through_is_named_with_host_and_port_and_the_line_that_opens_it():
    async def test(ring):
        kept, guest = full()
        with kept, guest:
            ring.lead("b", "c", kept.getsockname()[1])
            error = await unreached(ring.of["b"])
            where = f"127.0.0.1 port {kept.getsockname()[1]}"
        assert error.node == "c"
        assert f"b cannot reach c at {where}, where its supervisor listens (no connection): is a firewall" in str(error)
        assert str(error).endswith("sudo ufw allow in on lo from 127.0.0.1")

    run(test)


def test_a_port_that_refuses_is_named_too():
    async def test(ring):
        with nobody() as kept:
            ring.lead("a", "c", kept.getsockname()[1])
            error = await unreached(ring.of["a"])
        assert "(connection refused): is a firewall on c?" in str(error)
        assert "sudo ufw" in str(error)

    run(test)


def test_a_way_that_loses_large_packets_is_distinguished_from_a_firewall():
    async def test(ring):
        server = await asyncio.start_server(lambda r, w: small_only(r, w, ring.ports["c"]), "127.0.0.1", 0)
        ring.lead("b", "c", server.sockets[0].getsockname()[1])
        error = await unreached(ring.of["b"])
        server.close()
        assert "small packets pass, but large packets do not" in str(error)
        assert "firewall" not in str(error)

    run(test)


def test_who_listens_with_another_jobs_token_is_not_reached():
    async def test(ring):
        stranger = Peers("c", b"x" * 32, lambda: None)
        ring.lead("b", "c", await stranger.listen("127.0.0.1"))
        error = await unreached(ring.of["b"])
        stranger.close()
        assert error.node == "c"

    run(test)


def test_a_link_of_one_host_is_no_link_of_another():
    """Who stands between them could lead b to c where it asked for a."""

    async def test(ring):
        ring.lead("b", "a", ring.ports["c"])
        assert (await unreached(ring.of["b"])).node == "a"

    run(test)


def test_a_way_that_breaks_in_the_run_is_reported_and_so_is_its_repair():
    async def test(ring):
        await asyncio.gather(*(one.reach() for one in ring.of.values()))
        b, port = ring.of["b"], ring.ports["c"]
        with nobody() as kept:
            b._links["c"].socket  # noqa: B018 - there is one to break
            b._links["c"].close()
            ring.lead("b", "c", kept.getsockname()[1])
            for one in ring.of.values():
                one.watch()
            await ring.until(lambda: b.cut)
            assert [*b.cut] == ["c"]
            ring.lead("b", "c", port)
            await ring.until(lambda: not b.cut)
        assert (ring.of["a"].cut, ring.of["c"].cut) == ({}, {})

    run(test)


def test_a_way_that_begins_to_lose_large_packets_in_the_run_counts_as_cut():
    async def test(ring):
        await asyncio.gather(*(one.reach() for one in ring.of.values()))
        b = ring.of["b"]
        server = await asyncio.start_server(lambda r, w: small_only(r, w, ring.ports["c"]), "127.0.0.1", 0)
        ring.lead("b", "c", server.sockets[0].getsockname()[1])
        b._links["c"].close()
        b.watch()
        await ring.until(lambda: b.cut)
        server.close()
        assert "large packets do not" in b.cut["c"]

    run(test)


def test_a_host_that_accepts_and_says_nothing_is_stopped_or_busy_and_not_cut_off():
    async def test(ring):
        await asyncio.gather(*(one.reach() for one in ring.of.values()))
        b = ring.of["b"]
        with socket.create_server(("127.0.0.1", 0)) as mute:
            ring.lead("b", "c", mute.getsockname()[1])
            b._links["c"].close()
            b.watch()
            await asyncio.sleep(3 * wire.CUT_S)  # the time that must not strike
            assert b.cut == {}

    run(test)


def test_where_the_ranks_will_meet_can_be_tried_until_they_do():
    async def test(ring):
        await asyncio.gather(*(one.reach() for one in ring.of.values()))
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        ring.of["a"].open_rendezvous(listener)
        await ring.of["b"].reach_rendezvous("a", port)
        ring.of["a"].close_rendezvous()
        with pytest.raises(Unreached, match=f"a at 127.0.0.1 port {port}, where the ranks will meet"):
            await ring.of["b"].reach_rendezvous("a", port)
        with socket.create_server(("127.0.0.1", port)):
            pass  # it is free for them

    run(test)
