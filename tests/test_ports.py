"""The port to meet at: nobody else gets it, torchrun does."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.remote.ports import claim_port, holder

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


def release(claim):
    for kept in claim.kept_by:
        kept.close()


def test_the_port_that_is_wanted_is_claimed_where_it_is_free(port):
    claim = claim_port(port)
    assert claim.number == port
    release(claim)


def test_of_many_that_want_one_port_in_the_same_moment_one_gets_it_and_the_others_another(port):
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(claim_port, [port] * 8))
    numbers = [claim.number for claim in claims]
    assert len(set(numbers)) == 8
    assert numbers.count(port) == 1
    for claim in claims:
        release(claim)


def test_another_program_of_ours_does_not_get_a_claimed_port_and_gets_it_when_its_holder_is_gone(port):
    claim = claim_port(port)
    program = f"from orchestrator.remote.ports import claim_port; print(claim_port({port}).number)"
    ask = [sys.executable, "-c", program]
    assert int(subprocess.check_output(ask)) != port
    release(claim)
    assert int(subprocess.check_output(ask)) == port


def test_a_port_that_somebody_listens_on_is_not_claimed(server):
    claim = claim_port(server[1])
    assert claim.number != server[1]
    release(claim)


def test_a_claimed_port_is_torchruns_to_listen_on_and_nobodys_who_wants_it_for_himself(port):
    claim = claim_port(port)
    with socket.socket() as greedy, pytest.raises(OSError):
        greedy.bind(("", claim.number))
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        with socket.socket(family) as torchrun:
            torchrun.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            torchrun.bind((address, port))
            torchrun.listen()
    release(claim)


def test_who_has_a_port_is_named(server, port):
    assert holder(server[1]).startswith(f"pid {server[0].pid} ({sys.executable} -c import socket")
    assert holder(port) == "a process that has left again"
