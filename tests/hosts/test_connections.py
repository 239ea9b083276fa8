"""Connections of one command, and those that others have apart from them: who ends which."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import ConnectError
from orchestrator.hosts import Connections, Node
from orchestrator.paths import Home
from orchestrator.transport import values
from tests.support.sshd import Sshd, needs_sshd, running_sshd

pytestmark = needs_sshd


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with running_sshd(tmp_path) as server:
        yield server


def test_those_apart_end_with_the_others_and_nobody_dials_again(server: Sshd, tmp_path: Path) -> None:
    there = server.target()
    node = Node(
        name=there.node,
        host=there.host,
        port=there.port,
        user=there.user,
        key_file=there.key_file,
        host_key=server.host_key(),
    )
    with Connections(Home(tmp_path / "home")) as connections:
        hosts = values(connections.open([node]))
        apart = connections.apart(hosts)
        others = apart.__enter__()  # of a generator that nobody closes
        assert others.current(node.name).transport.run("echo it", timeout_s=10).stdout == b"it\n"
    for each in (connections, others):
        with pytest.raises(ConnectError, match="the command is over"):
            each.reopen(node.name)
    with pytest.raises(ConnectError):
        hosts[node.name].transport.run("echo it", timeout_s=10)
    assert server.logins() == 1
