"""Strangers at a supervisor's door, over real sockets: many, silent and at once, they keep no member out."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

from orchestrator.remote import link as door
from orchestrator.remote.coordinator import Hub
from orchestrator.remote.link import join_hub, listen_at
from tests.support.local_job import gang

TOKEN = b"t" * 32
SOON_S = 10.0
WAITS = "import time\ntime.sleep(120)\n"


@contextlib.contextmanager
def strangers(port, *, a_second=600, address="127.0.0.1"):
    """A crowd in a process of its own, for as long as the context is open."""
    words = [str(Path(__file__).parents[1] / "support" / "strangers.py"), address, str(port), str(a_second), "120"]
    crowd = subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert int(crowd.stdout.readline()) == 500
        yield crowd
        assert crowd.poll() is None
    finally:
        crowd.terminate()
        crowd.communicate()


@contextlib.asynccontextmanager
async def crowd_of(count, port, source="127.0.0.1"):
    made = [await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0)) for _ in range(count)]
    for reader, _ in made:
        with contextlib.suppress(ConnectionResetError):  # it was inside, or is out already
            await asyncio.wait_for(reader.readline(), SOON_S)
    try:
        yield [reader for reader, _ in made]
    finally:
        for _, writer in made:
            writer.close()


async def is_shown_out(reader):
    try:
        return await asyncio.wait_for(reader.read(1), SOON_S) == b""
    except ConnectionResetError:
        return True


def with_hub(test, members=frozenset("b")):
    async def inside():
        hub = Hub(set(members), TOKEN, lambda: {"do": "wait"}, lambda: None)
        try:
            await test(hub, await hub.listen("127.0.0.1"))
        finally:
            hub.close()

    asyncio.run(inside())


def test_of_too_many_strangers_the_oldest_goes_and_no_member():
    async def run(hub, port):
        member = await join_hub("127.0.0.1", port, "b", TOKEN)
        assert await member.receive(SOON_S) == {"do": "wait"}
        async with crowd_of(door.STRANGERS + 3, port) as crowd:
            assert [await is_shown_out(reader) for reader in crowd[:3]] == [True] * 3
            assert not crowd[3].at_eof()
            assert len(hub._listener._strangers) == door.STRANGERS
            assert hub.connected == 1
        member.close()

    with_hub(run)


def test_a_crowd_from_one_address_pushes_out_nobody_of_another():
    async def run(hub, port):
        async with crowd_of(1, port, "127.0.0.2") as (alone,), crowd_of(door.STRANGERS + 1, port) as crowd:
            assert await is_shown_out(crowd[0])
            assert not alone.at_eof()

    with_hub(run)


def test_a_stranger_that_says_nothing_has_to_go(monkeypatch):
    monkeypatch.setattr(door, "STRANGER_S", 0.1)

    async def run(hub, port):
        async with crowd_of(1, port) as (silent,):
            assert await is_shown_out(silent)
            assert not hub._listener._strangers

    with_hub(run)


def test_who_knocks_while_no_descriptor_is_left_is_let_in_as_soon_as_there_is_one(capfd):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def run(hub, port):
        with socket.socket() as knocks:
            knocks.setblocking(False)
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
            try:
                await asyncio.get_running_loop().sock_connect(knocks, ("127.0.0.1", port))
                await asyncio.sleep(3 * door.RETRY_S)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            assert len(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(knocks, 100), SOON_S)) == 33

    with_hub(run)
    assert capfd.readouterr().err == ""


def test_an_address_of_either_kind_is_listened_at_alone():
    for address in ("127.0.0.1", "::1"):
        with listen_at(address) as listener:
            assert listener.getsockname()[0] == address


def test_a_member_comes_in_while_six_hundred_a_second_knock():
    async def run(hub, port):
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            await loop.run_in_executor(None, stack.enter_context, strangers(port))
            for _ in range(5):
                assert await asyncio.wait_for(persistent(port), SOON_S) == {"do": "wait"}

    async def persistent(port):
        """As `Membership.stay` does."""
        while True:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                link = await join_hub("127.0.0.1", port, "b", TOKEN)
                try:
                    return await link.receive(SOON_S)
                finally:
                    link.close()
            await asyncio.sleep(0.2)

    with_hub(run)


def test_a_crowd_at_the_hub_neither_ends_a_job_nor_hides_its_first_cause(tmp_path):
    with gang(tmp_path, WAITS) as job:
        job.launch()
        agents = job.wait_running()
        for agent in agents.values():
            resource.prlimit(agent["pid"], resource.RLIMIT_NOFILE, (256, 256))
        with strangers(agents["a"]["hub_port"]) as crowd:
            while int(crowd.stdout.readline()) < 1500:
                pass
            now = job.agents()
            assert [one["state"] for one in now.values()] == ["running"] * 2, now
            os.kill(agents["b"]["ranks"]["1"]["pid"], signal.SIGKILL)
            record = job.wait()
        assert (record.state, record.exit_code) == ("failed", 137)
        assert (record.first_failure.node, record.first_failure.rank) == ("b", 1)
        assert [job.folder(name).joinpath("supervisor.log").stat().st_size for name in "ab"] == [0, 0]


def test_ranks_have_the_descriptors_that_their_host_gives_them(tmp_path):
    """The supervisor takes all that it may have; what runs for the person keeps the limit that was set for it."""
    says = "import json, resource\nprint(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))\n"
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    try:
        with gang(tmp_path, says, ranks=(1,)) as job:
            job.launch()
            job.wait()
            said = json.loads((job.folder("a") / "rank-0" / "stdout.log").read_text())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert said == [min(512, before[1]), before[1]]
