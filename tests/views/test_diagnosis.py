"""What `orch doctor` prints, on screens of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from orchestrator.doctor import Mesh, Pair, judge
from orchestrator.views import console, host_tables
from tests.support.examined_hosts import NAMES, host, pairs, seen


def printed(looked_at, monkeypatch, width=200):
    stream = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=stream, width=width, soft_wrap=True, highlight=False))
    host_tables.print_diagnosis(judge(looked_at))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("width", "cell"), [(200, "0.3 ms, 2.3Gbps"), (40, "2.3Gbps"), (20, "6 connections between hosts, 5 open")]
)
def test_the_matrix_holds_what_the_screen_has_room_for(width, cell, monkeypatch):
    shown = printed(seen(mesh=Mesh(pairs(kind="refused"))), monkeypatch, width)
    assert cell in shown
    assert ("ms" in shown.partition("block:")[0]) == (width == 200)
    assert "block: P14 connections between hosts, a2000 -> a16: the connection is refused" in shown


def test_findings_that_differ_in_their_hosts_alone_stand_there_once(monkeypatch):
    hosts = [host(name, facts_changes={"hostname_addresses": ("127.0.1.1",)}) for name in NAMES]
    ways = Mesh(pairs([("a2000", "a16"), ("v100", "a16")], kind="mute"))
    shown = printed(seen(*hosts, mesh=ways), monkeypatch)
    assert "P16 own host name, a16, a2000, v100: " in shown
    assert shown.count("P16 own host name, ") == 1
    assert shown.count("P14 connections between hosts, ") == 2  # whom to look at differs
    assert shown.splitlines()[-1].startswith(
        f"{len(judge(seen()).passed) - 2} checks passed, 5 findings of 2 kinds (2 block), "
    )


def test_of_many_hosts_the_ways_are_counted(monkeypatch):
    names = [f"n{number}" for number in range(13)]
    mesh = Mesh(tuple(Pair(start, end, "open") for start in names for end in names if start != end))
    hosts = tuple(host("v100", node_changes={"name": name}) for name in names)
    assert "156 connections between hosts, 156 open" in printed(seen(hosts=hosts, mesh=mesh), monkeypatch)


def test_nothing_that_a_host_says_steers_the_terminal_or_is_markup(monkeypatch):
    sick = host("a16", health_changes={"reboot": ("[red]x[/red]",)})
    shown = printed(
        seen(sick, mesh=Mesh(pairs(kind="refused", words="\x1b[2J[bold]no", opens="\x1b]0;x\x07sudo"))), monkeypatch
    )
    assert "\x1b" not in shown
    assert "[red]x[/red]" in shown
    assert "[bold]no" in shown
