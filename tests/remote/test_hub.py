"""The wire between supervisors over real sockets on the loopback, its times shortened."""

import asyncio
import contextlib
import json
import time

import pytest

from orchestrator.remote import link as wire
from orchestrator.remote import membership
from orchestrator.remote.coordinator import Hub
from orchestrator.remote.link import join_hub
from orchestrator.remote.membership import Membership

TOKEN = b"t" * 32
SOON_S = 10.0


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    monkeypatch.setattr(membership, "BEAT_S", 0.05)
    monkeypatch.setattr(membership, "LEASE_S", 1.0)
    monkeypatch.setattr(membership, "QUIET_S", 0.2)
    monkeypatch.setattr(membership, "BROKEN_S", 0.6)


class Wire:
    """A hub that expects member `b`, and what became of it."""

    async def __aenter__(self):
        self.changes = asyncio.Event()
        self.order = {"do": "wait"}
        self.hub = Hub({"b"}, TOKEN, lambda: self.order, self.changes.set)
        self.port = await self.hub.listen("127.0.0.1")
        return self

    async def __aexit__(self, *_):
        self.hub.close()

    async def until(self, condition):
        async def wait():
            while not condition(self.hub):
                self.changes.clear()
                await self.changes.wait()

        await asyncio.wait_for(wait(), SOON_S)

    async def join(self, node="b", token=TOKEN):
        return await join_hub("127.0.0.1", self.port, node, token)


def on_a_hub(test):
    """Runs an async test with a Wire."""

    def run():
        async def inside():
            async with Wire() as wired:
                await test(wired)

        asyncio.run(inside())

    run.__name__ = test.__name__
    return run


async def is_closed(reader):
    """Whether the other side hangs up (what it said before that is skipped)."""
    with contextlib.suppress(ConnectionResetError):
        while await asyncio.wait_for(reader.read(1 << 16), SOON_S):
            pass
    return True


@on_a_hub
async def test_a_member_with_the_token_is_heard_and_gets_orders(wired):
    link = await wired.join()
    link.send({"phase": "joined"})
    assert await link.receive(SOON_S) == {"do": "wait"}
    await wired.until(lambda hub: hub.statuses.get("b") == {"phase": "joined"})
    link.close()


@on_a_hub
async def test_a_stranger_without_the_token_hears_no_order_and_is_no_member(wired):
    link = await wired.join(token=b"x" * 32)
    link.send({"phase": "joined"})
    with pytest.raises(OSError):
        await link.receive(SOON_S)
    assert (wired.hub.statuses, wired.hub.connected) == ({}, 0)
    link.close()


@on_a_hub
async def test_a_node_that_is_no_member_is_refused_even_with_the_token(wired):
    link = await wired.join(node="c")
    with pytest.raises(OSError):
        await link.receive(SOON_S)
    assert wired.hub.connected == 0
    link.close()


GARBAGE = [
    b"hello\n",
    b"[1]\n",
    b"{}\n",
    b"7\n",
    b"[" * 5_000 + b"\n",
    b'{"node": "b", "nonce": "", "mac": "\\ud800"}\n',
]


@pytest.mark.parametrize("line", [*GARBAGE, b"x" * (1 << 17) + b"\n"], ids=lambda line: line[:20].decode())
def test_garbage_instead_of_a_greeting_is_hung_up_on_and_harms_nobody(line):
    @on_a_hub
    async def run(wired):
        reader, writer = await asyncio.open_connection("127.0.0.1", wired.port)
        writer.write(line)
        assert await is_closed(reader)
        writer.close()
        link = await wired.join()
        assert await link.receive(SOON_S) == {"do": "wait"}
        link.close()

    run()


@on_a_hub
async def test_a_greeting_heard_on_one_connection_opens_no_other(wired):
    reader, writer = await asyncio.open_connection("127.0.0.1", wired.port)
    theirs = (await reader.readline())[:-1].decode()
    key = wire.session_key(TOKEN, theirs, "n", "b")
    greeting = (
        json.dumps({"node": "b", "nonce": "n", "mac": wire.mac_of(key, b"join", 0, b"b").decode()}).encode() + b"\n"
    )
    writer.write(greeting)
    assert b'{"do": "wait"}' in await asyncio.wait_for(reader.readline(), SOON_S)
    again, other = await asyncio.open_connection("127.0.0.1", wired.port)
    other.write(greeting)
    assert await is_closed(again)
    writer.close()
    other.close()


def forged(link):
    link._writer.write(b"0" * 64 + b' {"phase": "ended"}\n')


def replayed(link):
    line = wire.mac_of(link._key, b"member", 0, b'{"phase": "joined"}') + b' {"phase": "joined"}\n'
    link._writer.write(line + line)


def reordered(link):
    lines = [wire.mac_of(link._key, b"member", n, b'{"n": %d}' % n) + b' {"n": %d}\n' % n for n in (1, 0)]
    link._writer.writelines(lines)


def reflected(link):
    link._writer.write(wire.mac_of(link._key, b"hub", 0, b'{"do": "wait"}') + b' {"do": "wait"}\n')


def not_json(link):
    link._writer.write(wire.mac_of(link._key, b"member", 0, b"hello") + b" hello\n")


@pytest.mark.parametrize("say", [forged, replayed, reordered, reflected, not_json])
def test_a_line_that_is_not_the_expected_next_one_closes_the_link(say):
    @on_a_hub
    async def run(wired):
        link = await wired.join()
        say(link)
        assert await is_closed(link._reader)
        assert wired.hub.connected == 0
        assert wired.hub.statuses in ({}, {"b": {"phase": "joined"}})
        link.close()

    run()


@on_a_hub
async def test_a_silent_member_is_lost_after_the_lease(wired):
    link = await wired.join()
    link.send({"phase": "joined"})
    await wired.until(lambda hub: "b" in hub.lost)
    assert "no word for" in wired.hub.lost["b"]
    link.close()


@on_a_hub
async def test_a_member_that_never_comes_is_lost_after_the_time_for_joining(wired):
    wired.hub.expect(0.1, "look at the firewall")
    await wired.until(lambda hub: "b" in hub.lost)
    where = f"127.0.0.1 port {wired.port}"
    assert wired.hub.lost["b"] == f"did not reach the master at {where} within 0 s: look at the firewall"


@on_a_hub
async def test_a_member_whose_connection_breaks_is_lost_unless_it_dials_again(wired):
    link = await wired.join()
    link.send({"phase": "running"})
    await wired.until(lambda hub: "b" in hub.statuses)
    link.close()
    await wired.until(lambda hub: "b" in hub.lost)
    assert "supervisor is gone" in wired.hub.lost["b"]


@on_a_hub
async def test_a_member_silent_at_its_turn_is_soon_lost_and_the_reason_names_the_queue(
    wired,
):
    wired.order = {"do": "queue"}
    link = await wired.join()
    link.send({"phase": "queued"})
    await wired.until(lambda hub: "b" in hub.statuses)
    wired.order = {"do": "wait"}
    wired.hub.expect_word()
    await wired.until(lambda hub: "b" in hub.lost)
    why = "no word for 1 s: host down, frozen or cut off; the job was still queued: submit it again"
    assert wired.hub.lost["b"] == why
    link.close()


@on_a_hub
async def test_a_member_that_dials_again_at_once_is_not_lost(wired):
    member = Member(wired)
    await wired.until(lambda hub: "b" in hub.statuses)
    for _ in range(3):
        first = member.it._link
        first._writer.transport.abort()
        while member.it._link in (None, first):
            await asyncio.sleep(0.01)
    await asyncio.sleep(2 * membership.BROKEN_S)  # the deadline that must not strike
    assert (wired.hub.lost, wired.hub.connected, member.gone) == ({}, 1, [])
    await member.leave()


@on_a_hub
async def test_a_member_that_has_ended_may_leave(wired):
    link = await wired.join()
    link.send({"phase": "ended"})
    await wired.until(lambda hub: "b" in hub.statuses)
    link.close()
    await wired.until(lambda hub: hub.connected == 0)
    await asyncio.sleep(2 * membership.BROKEN_S)  # the deadline that must not strike
    assert wired.hub.lost == {}


@on_a_hub
async def test_a_member_asked_to_close_leaves_and_reports_nobody_lost(wired):
    member = Member(wired)
    await wired.until(lambda hub: "b" in hub.statuses)
    await member.leave()
    assert member.gone == []


@on_a_hub
async def test_a_member_notices_a_hub_that_is_gone(wired):
    member = Member(wired)
    await wired.until(lambda hub: "b" in hub.statuses)
    wired.hub.close()
    await asyncio.wait_for(member.task, SOON_S)
    (why,) = member.gone
    assert "the master" in why


def test_a_member_that_reaches_no_hub_says_where_it_looked():
    async def run():
        gone = []
        await Membership(("127.0.0.1", 1), "b", TOKEN, dict, lambda order: None, gone.append).stay(0.1)
        return gone

    (why,) = asyncio.run(run())
    assert why.startswith("cannot reach the master at 127.0.0.1:1 (")


@on_a_hub
async def test_a_member_whose_connection_falls_silent_dials_again_before_its_lease_is_over(wired):
    async with Cable(wired.port) as cable:
        member = Member(wired, cable.port)
        await wired.until(lambda hub: "b" in hub.statuses)
        for _ in range(2):
            cable.swallow()  # as a cut does: what is under way is lost, and nobody learns of it
            first = member.it._link
            while member.it._link in (None, first):
                await asyncio.sleep(0.01)
        await asyncio.sleep(2 * membership.LEASE_S)  # the deadline that must not strike
        assert (wired.hub.lost, wired.hub.connected, member.gone) == ({}, 1, [])
        await member.leave()


@on_a_hub
async def test_a_member_cut_off_for_good_is_lost_on_both_sides_when_the_lease_is_over(wired):
    async with Cable(wired.port) as cable:
        member = Member(wired, cable.port)
        await wired.until(lambda hub: "b" in hub.statuses)
        cable.swallow(for_good=True)
        await wired.until(lambda hub: "b" in hub.lost)
        await asyncio.wait_for(member.task, SOON_S)
        assert "no word for" in wired.hub.lost["b"]
        assert "no word from the master" in member.gone[0]


@on_a_hub
async def test_a_member_that_bears_longer_silence_stays(wired):
    async with Cable(wired.port) as cable:
        member = Member(wired, cable.port, silence_s=100.0)
        await wired.until(lambda hub: "b" in hub.statuses)
        cable.swallow(for_good=True)
        await wired.until(lambda hub: "b" in hub.lost)  # by the hub's own lease
        assert not member.task.done()
        await member.leave()


@on_a_hub
async def test_a_hub_that_refuses_connections_is_gone_before_the_lease_is_over(wired):
    membership.LEASE_S = 100.0  # only the refusal is left to show it; the fixture puts it back
    member = Member(wired)
    await wired.until(lambda hub: "b" in hub.statuses)
    wired.hub.close()
    await asyncio.wait_for(member.task, SOON_S)
    assert member.gone == ["the master's supervisor is gone"]


def test_a_hub_that_hears_none_of_several_hosts_takes_itself_for_the_one_that_is_cut_off():
    async def run():
        hub = Hub({"b", "c"}, TOKEN, lambda: {"do": "wait"}, lambda: None)
        port = await hub.listen("127.0.0.1")
        found = []
        links = {node: await join_hub("127.0.0.1", port, node, TOKEN) for node in "bc"}
        for speakers in ("bc", "b", ""):
            deadline = time.monotonic() + membership.LEASE_S
            while time.monotonic() < deadline:
                for node in speakers:
                    links[node].send({"phase": "running"})
                await asyncio.sleep(0.1)
            found.append((sorted(hub.lost), hub.is_cut_off))
        for link in links.values():
            link.close()
        hub.close()
        return found

    assert asyncio.run(run()) == [([], False), (["c"], False), (["b", "c"], True)]


def test_who_stood_still_knows_it_before_and_after_its_next_beat():
    async def run():
        pulse = membership.Pulse()
        beats = asyncio.create_task(pulse.beat())
        await asyncio.sleep(3 * membership.BEAT_S)
        calm_s = pulse.longest_s
        time.sleep(calm_s + 1.0)  # the whole loop stands still
        before_s = pulse.longest_s
        await asyncio.sleep(3 * membership.BEAT_S)
        beats.cancel()
        return calm_s, before_s, pulse.longest_s

    calm_s, before_s, after_s = asyncio.run(run())
    assert calm_s + 1.0 <= before_s <= after_s


class Cable:
    """Between a member and the hub: carries both ways until it swallows all."""

    def __init__(self, hub_port):
        self._hub_port, self._open, self._tasks, self._writers = hub_port, True, set(), []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.swallow()
        for writer in self._writers:
            writer.close()

    def swallow(self, for_good=False):
        """Every connection that stands now falls silent; with for_good, later ones too."""
        self._open = not for_good
        for task in self._tasks:
            task.cancel()
        self._tasks = set()

    async def _accept(self, reader, writer):
        self._writers.append(writer)
        if self._open:
            there = await asyncio.open_connection("127.0.0.1", self._hub_port)
            self._writers.append(there[1])
            for source, sink in ((reader, there[1]), (there[0], writer)):
                self._tasks.add(asyncio.create_task(self._carry(source, sink)))

    async def _carry(self, source, sink):
        while data := await source.read(1 << 16):
            sink.write(data)
        sink.close()


class Member:
    def __init__(self, wired, port=None, silence_s=None):
        self.gone = []
        place = ("127.0.0.1", port or wired.port)
        status, obey = lambda: {"phase": "running"}, lambda order: None
        self.it = Membership(place, "b", TOKEN, status, obey, self.gone.append, silence_s)
        self.task = asyncio.create_task(self.it.stay(SOON_S))

    async def leave(self):
        self.it.close()
        await asyncio.wait_for(self.task, SOON_S)
