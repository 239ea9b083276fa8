"""The ways between hosts, tried over real sockets on the loopback: open, broken in every way, and knocked at."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from orchestrator.remote import mesh
from orchestrator.remote import mesh as way
from orchestrator.remote.mesh import Mesh
from orchestrator.transport import ConnectedHost, LocalTransport, exchange
from tests.remote.test_peers import full, nobody, small_only

TOKEN = b"t" * 32
SOON_S = 20.0


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    for name, seconds in {"CONNECT_S": 0.5, "ANSWER_S": 0.5}.items():
        monkeypatch.setattr(way, name, seconds)
    monkeypatch.setattr(mesh, "KNOCK_S", 0.3)


def run(test):
    """Two hosts of a mesh, both listening."""

    async def inside():
        a, b = Mesh("a", "127.0.0.1", TOKEN), Mesh("b", "127.0.0.1", TOKEN)
        try:
            await asyncio.wait_for(test(a, b, await b.listen()), SOON_S)
        finally:
            for one in (a, b):
                with contextlib.suppress(AttributeError):  # it never listened
                    one.close()

    asyncio.run(inside())


async def reached(a, port, ssh_port=1, address="127.0.0.1"):
    place = {"address": address, "port": port, "interface": "eno1", "firewall": "ufw", "ssh_port": ssh_port}
    return (await a.reach({"b": place}))["b"]


def test_a_way_that_is_open_has_a_round_trip_and_a_speed():
    async def test(a, b, port):
        found = await reached(a, port)
        assert found["kind"] == "open"
        assert 0 < found["round_trip_s"] < SOON_S
        sent = await a.send("b", 0.1)
        assert sent["bits_per_s"] > 1e6
        assert 0 < sent["round_trip_s"] < SOON_S

    run(test)


def test_a_port_that_refuses_is_named_with_the_line_that_opens_it():
    async def test(a, b, port):
        with nobody() as kept:
            found = await reached(a, kept.getsockname()[1])
        assert (found["kind"], found["words"]) == ("refused", "connection refused")
        assert found["opens"] == "sudo ufw allow in on eno1 from 127.0.0.1"

    run(test)


def test_a_port_that_swallows_connections_is_filtered_where_another_port_answers_and_silent_where_none_does():
    async def test(a, b, port):
        kept, guest = full()
        with kept, guest, nobody() as refuses:
            assert (await reached(a, kept.getsockname()[1], refuses.getsockname()[1]))["kind"] == "filtered"
            assert (await reached(a, kept.getsockname()[1], port))["kind"] == "filtered"
            assert (await reached(a, kept.getsockname()[1], kept.getsockname()[1]))["kind"] == "silent"

    run(test)


def test_a_way_that_loses_large_packets_is_told_from_a_firewall():
    async def test(a, b, port):
        server = await asyncio.start_server(lambda r, w: small_only(r, w, port), "127.0.0.1", 0)
        found = await reached(a, server.sockets[0].getsockname()[1])
        server.close()
        assert found["kind"] == "small only"

    run(test)


def test_somebody_else_who_listens_there_is_not_taken_for_the_host():
    async def test(a, b, port):
        with socket.create_server(("127.0.0.1", 0)) as mute:
            assert (await reached(a, mute.getsockname()[1]))["kind"] == "mute"
        stranger = Mesh("b", "127.0.0.1", b"x" * 32)
        found = await reached(a, await stranger.listen())
        stranger.close()
        assert found["kind"] in ("mute", "hung up")

    run(test)


def test_a_stranger_without_the_token_is_hung_up_on_and_sends_nothing_that_counts():
    async def test(a, b, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert len(await reader.readline()) == 33
        writer.write(json.dumps({"node": "a", "nonce": "0" * 32, "mac": "0" * 64}).encode() + b"\n")
        writer.write(b'0 {"ask": 0, "pad": "x"}\n')
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert (await reached(a, port))["kind"] == "open"

    run(test)


# ---- the program itself --------------------------------------------------------------------------------------------


class Heard:
    """The program on this machine, as a controller hears it; `lines` are its orders."""

    def __init__(self, limit_s=60.0):
        self.words, self.orders = [], threading.Event()
        self.request = {"name": "here", "address": "127.0.0.1", "token": TOKEN.hex(), "limit_s": limit_s}

    @contextlib.contextmanager
    def open(self):
        host = ConnectedHost(LocalTransport("here"), sys.executable, None, "~/.orch")
        with exchange(host, "mesh", self.request, self._lines()) as words:
            try:
                yield next(word["port"] for word in words if "port" in word), words
            finally:
                self.orders.set()

    def _lines(self):
        self.orders.wait(60)
        yield b'{"over": 1}\n'


def listens(port):
    with socket.socket() as knock:
        return knock.connect_ex(("127.0.0.1", port)) == 0


def until_closed(port, within_s):
    end = time.monotonic() + within_s
    while listens(port):
        assert time.monotonic() < end, "it still listens"
        time.sleep(0.05)


def test_it_listens_no_longer_than_its_limit_whatever_its_controller_does():
    with Heard(limit_s=1.5).open() as (port, _):
        assert listens(port)
        until_closed(port, 30)


def test_it_listens_no_more_when_its_connection_ends():
    """All that a program sees of that behind an sshd is the end of its input."""
    request = {**Heard().request, "marker": "MARK"}
    program = f"from orchestrator.remote import mesh; mesh.main({request!r})"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as running:
        said = b""
        while b"port" not in said:
            said += running.stdout.readline()
        port = next(json.loads(word)["port"] for word in said.split(b"MARK") if b"port" in word)
        assert listens(port)
        running.stdin.close()
        until_closed(port, 30)
        running.wait(30)


def test_it_listens_on_its_training_address_alone():
    with Heard().open() as (port, _):
        with socket.socket() as knock:
            assert knock.connect_ex(("127.0.0.2", port)) != 0
        table = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert [place for place in table if place.endswith(f":{port:04X}") and place.startswith("00000000")] == []


def test_an_address_that_is_not_its_own_is_said_to_be_so():
    host = ConnectedHost(LocalTransport("here"), sys.executable, None, "~/.orch")
    request = {"name": "here", "address": "192.0.2.1", "token": TOKEN.hex(), "limit_s": 60.0}
    with exchange(host, "mesh", request) as words:
        said = [word for word in words if word and "beat" not in word]
    assert said == [{"closed": "Cannot assign requested address (192.0.2.1)"}, {"end": {}}]
