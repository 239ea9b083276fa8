"""Connections of one command, and those that others have apart from them: who ends which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import ConnectError, LateError
from orchestrator.hosts import Connections, Node
from orchestrator.paths import Home
from orchestrator.transport import LocalTransport, values
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


@pytest.mark.parametrize(("count", "tries"), [(40, 2), (8, 1)])
def test_late_hosts_of_a_crowd_are_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, tries: int
) -> None:
    """A few hosts are not: one that is off would only cost the time twice."""
    nodes = [Node(name=f"h{number}", host="127.0.0.1", transport="local") for number in range(count)]
    asked, late = Counter[str](), {"h1", "h3"}

    def connect(self: Connections, node: Node, timeout_s: float, dial_s: float) -> LocalTransport:
        asked[node.name] += 1
        if node.name in late and asked[node.name] == 1:
            raise LateError(node.name, "no SSH login within 10 s")
        return LocalTransport(node.name)

    monkeypatch.setattr(Connections, "_connect", connect)
    with Connections(Home(tmp_path / "home")) as connections:
        found = connections.open(nodes)
    assert {name for name, outcome in found.items() if isinstance(outcome, LateError)} == (
        late if tries == 1 else set()
    )
    assert [*found] == [node.name for node in nodes]
    assert {asked[name] for name in late} == {tries} and asked.total() == count + (2 if tries == 2 else 0)
