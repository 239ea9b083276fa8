"""The port to meet at: nobody else gets it, and only the job's hosts reach what listens there."""

import contextlib
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.remote.ports import admit, claim_port, listen, own_source

HERE = "127.0.0.1"
LISTENS = "import socket, sys; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); input()"


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture
def server():
    program = [sys.executable, "-c", LISTENS]
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield child, int(child.stdout.readline())
    child.communicate("\n")


@contextlib.contextmanager
def claimed(port, address=HERE):
    claim = claim_port(address, port)
    try:
        yield claim
    finally:
        claim.close()


def test_the_port_that_is_wanted_is_claimed_where_it_is_free(port):
    with claimed(port) as claim:
        assert claim.number == port
        assert claim.store.getsockname() == (HERE, port)


def test_of_many_that_want_one_port_in_the_same_moment_one_gets_it_and_the_others_another(port):
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: claim_port(HERE, port), range(8)))
    numbers = [claim.number for claim in claims]
    assert len(set(numbers)) == 8
    assert numbers.count(port) == 1
    for claim in claims:
        claim.close()


def test_another_program_of_ours_does_not_get_a_claimed_port_and_gets_it_when_its_holder_is_gone(port):
    program = f"from orchestrator.remote.ports import claim_port; print(claim_port('{HERE}', {port}).number)"
    ask = [sys.executable, "-c", program]
    with claimed(port):
        assert int(subprocess.check_output(ask)) != port
    assert int(subprocess.check_output(ask)) == port


def test_a_port_that_somebody_listens_on_is_not_claimed(server):
    with claimed(server[1]) as claim:
        assert claim.number != server[1]


@pytest.mark.parametrize("place", ["", HERE])
def test_between_our_look_and_torchruns_nobody_takes_a_claimed_port(port, place):
    with claimed(port) as claim:
        for reuse in (0, 1):
            with socket.socket() as thief, pytest.raises(OSError):
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                thief.bind((place, port))
                thief.listen()
        listen(claim.store)


def test_a_port_whose_last_connections_are_only_waiting_to_go_is_claimed_again(port):
    for _ in range(2):
        with claimed(port) as claim:
            assert claim.number == port
            listen(claim.store)
            with socket.create_connection((HERE, port)) as caller:
                claim.store.accept()[0].close()  # who closes first keeps the port waiting (TIME_WAIT)
                assert caller.recv(1) == b""


def test_an_address_that_is_not_this_hosts_is_no_place_to_meet():
    with pytest.raises(OSError):
        claim_port("192.0.2.1", 29500)


MANY = {f"10.{high}.{low}.1" for high in range(4) for low in range(250)}


@pytest.mark.parametrize(
    ("address", "admitted", "caller", "expected"),
    [
        (HERE, {HERE}, HERE, True),
        (HERE, {HERE}, "127.0.0.2", False),
        (HERE, {HERE, "127.0.0.2", "::1"}, "127.0.0.2", True),
        (HERE, {"::1"}, HERE, False),
        (HERE, MANY | {"127.0.0.2"}, "127.0.0.2", True),
        (HERE, MANY, "127.0.0.2", False),
        ("::1", {"::1", "fe80::1%eth0"}, "::1", True),
        ("::1", {"::2", "fd00::1"}, "::1", False),
    ],
)
def test_only_from_the_addresses_of_the_jobs_hosts_can_anybody_connect(address, admitted, caller, expected):
    with claimed(0, address) as claim, socket.socket(claim.store.family) as other:
        admit(claim.store, admitted)
        listen(claim.store)
        other.bind((caller, 0))
        other.settimeout(5.0 if expected else 0.5)
        try:
            other.connect(claim.store.getsockname()[:2])
        except TimeoutError:
            assert not expected
        else:
            assert expected


@pytest.mark.parametrize("address", [HERE, "127.0.0.2", "::1"])
def test_the_hosts_own_ranks_reach_the_store_whatever_address_they_come_from(address):
    with claimed(0, address) as claim:
        admit(claim.store, {own_source(claim.store)})
        listen(claim.store)
        socket.create_connection(claim.store.getsockname()[:2], timeout=5.0).close()
