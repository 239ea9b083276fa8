"""Who of a cluster's hosts answers now: each is dialled, for a bounded time, and shown with the age of its facts."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli import main
from orchestrator.errors import AuthError, ConnectError
from orchestrator.hosts import Cluster, Connections, Node, connections
from orchestrator.paths import Home
from orchestrator.store import Store
from orchestrator.units import format_age
from orchestrator.views import console, documents, host_tables
from tests.support.probed_hosts import facts, gpu


@contextlib.contextmanager
def off() -> Iterator[int]:
    """A port whose host takes no connection and refuses none, as one that is powered off: its queue is full."""
    with contextlib.ExitStack() as open_sockets:
        server = open_sockets.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()[1]


@contextlib.contextmanager
def mute() -> Iterator[int]:
    """A host that is up, and too busy to say a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield server.getsockname()[1]


def node(name: str, port: int = 22, **keys: object) -> Node:
    return Node.model_validate({"name": name, "host": "127.0.0.1", "port": port, "user": "me", **keys})


def ago(**span: int) -> str:
    return (datetime.now(timezone.utc) - timedelta(**span)).isoformat(timespec="seconds")


def test_a_host_that_is_off_costs_less_than_one_that_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "DIAL_S", 0.3)
    monkeypatch.setattr(connections, "LOGIN_S", 1.0)
    with off() as dead, mute() as busy, Connections(Home(tmp_path)) as all_at_once:
        nodes = [node("dead", dead), node("busy", busy), node("here", transport="local")]
        silent = all_at_once.silent(nodes)
    assert {name: error.message for name, error in silent.items()} == {
        "dead": f"dead: 127.0.0.1:{dead}: no answer within 0.3 s",
        "busy": f"busy: 127.0.0.1:{busy}: no SSH login within 1 s",
    }


def remembered(home: Path, *nodes: Node) -> Cluster:
    probed = {one.name: ago(hours=2, minutes=5) for one in nodes}
    cluster = Cluster(schema=1, name="rack", file="rack.yaml", nodes=nodes, master=nodes[0].name, probed=probed)
    Store(Home(home)).save_cluster(cluster, current=True)
    return cluster


def test_status_says_who_answers_and_when_they_were_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    monkeypatch.setattr(connections, "DIAL_S", 0.3)
    with off() as dead:
        cluster = remembered(tmp_path, node("here", transport="local"), node("dead", dead))
        nodes = json.loads(CliRunner().invoke(main, ["status", "--json"]).stdout)["cluster"]["nodes"]
        as_left = json.loads(CliRunner().invoke(main, ["status", "--json", "--no-look"]).stdout)["cluster"]["nodes"]
    assert [(one["status"], one["answers"]) for one in nodes] == [("master", True), ("no answer", False)]
    assert [(one["status"], one["answers"]) for one in as_left] == [("master", None), ("not probed", None)]
    assert [one["probed"] for one in nodes] == list(cluster.probed.values())


def test_the_table_of_status_has_the_age_of_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = remembered(tmp_path, node("a", note="old"), node("b"))
    silent = {"a": ConnectError("a", "no answer within 2 s", "look"), "b": AuthError("b", "login refused", "key")}
    with console.out.capture() as shown:
        host_tables.print_status(cluster, silent)
    lines = shown.get().splitlines()
    assert lines[1].endswith("facts from")
    assert [" ".join(line.split()).rpartition("127.0.0.1 ")[2] for line in lines[2:4]] == [
        "old no answer 2 h ago",
        "unusable 2 h ago",
    ]
    assert "a: no answer within 2 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "just now"),
        (59, "just now"),
        (60, "1 min ago"),
        (7500, "2 h ago"),
        (90000, "1 day ago"),
        (3e5, "3 days ago"),
    ],
)
def test_an_age_is_shown_in_its_largest_unit(seconds: float, words: str) -> None:
    assert format_age(seconds) == words


def test_a_host_that_trains_on_its_cpu_is_shown_without_its_gpu() -> None:
    nodes, found = (node("a"), node("b", device="cpu")), facts(gpus=(gpu(name="H100"),))
    cluster = Cluster(schema=1, name="rack", file="rack.yaml", nodes=nodes, facts={"a": found, "b": found})
    assert [row["gpu"] for row in documents.cluster_json(cluster)["nodes"]] == ["H100", "CPU"]
