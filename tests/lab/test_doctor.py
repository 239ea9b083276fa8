"""`orch doctor` over hosts that are hosts: a sound rack, and one of which everything is broken on purpose."""

from __future__ import annotations

import contextlib
import time

import pytest

from tests.support.lab import lab
from tests.support.sshd import wait_for
from tests.support.terminal import Person

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

INVENTORY = """
cluster: doctor
defaults: {device: cpu}
nodes:
  - {name: alpha, host: 10.77.31.1, master: true}
  - {name: beta, host: 10.77.31.2}
  - {name: gamma, host: 10.77.31.3}
"""
NO_SLEEP = "ps -eo args | grep -c '^sleep 30$'"
FILTER = """
table inet filter
delete table inet filter
table inet filter {
    chain input {
        type filter hook input priority 0; policy accept
        %s
    }
}
"""


@pytest.fixture(scope="module")
def person(tmp_path_factory):
    with lab(INVENTORY, quick=True) as hosts:
        someone = Person(hosts, tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("work"))
        someone.types("up", str(hosts.inventory))
        yield someone


@contextlib.contextmanager
def filtered(person, node, rule):
    person.lab.host_exec(node, ["nft", "-f", "-"], input=FILTER % rule, check=True)
    try:
        yield
    finally:
        person.lab.host_exec(node, ["nft", "-f", "-"], input="flush ruleset", check=True)


def ways(found):
    return {(pair["start"], pair["end"]): pair["kind"] for pair in found["pairs"]}


def blocking(found):
    return {(one["id"], *one["where"]) for one in found["findings"] if one["level"] == "block"}


def listening(person, node):
    """Where somebody waits for connections there, but for its sshd."""
    rows = person.lab.host_exec(node, ["ss", "-ltnH"]).stdout.splitlines()
    return [row.split()[3] for row in rows if not row.split()[3].endswith(":22")]


def test_in_a_sound_rack_nothing_blocks_and_nothing_stays_behind(person):
    found = person.asks("doctor")
    assert blocking(found) == set()
    assert set(ways(found).values()) == {"open"}
    assert len(found["pairs"]) == 6
    assert all(pair["round_trip_s"] > 0 and pair["bits_per_s"] > 0 for pair in found["pairs"])
    assert found["unreached"] == {}
    assert found["not_applicable"]["P10"] == "no GPU there"
    assert {"P12", "P13", "P14", "P17", "P18", "P30", "P35"} <= {*found["passed"]}
    for node in ("alpha", "beta", "gamma"):
        wait_for(lambda node=node: listening(person, node) == [], f"nobody to listen on {node} any more")
        assert person.lab.host_exec(node, ["sh", "-c", NO_SLEEP]).stdout.strip() == "0"
        assert person.lab.host_exec(node, ["find", "/home/lab", "-name", "*orch*"]).stdout == ""


def test_a_file_that_nobody_brought_up_is_checked_without_being_remembered(person, tmp_path):
    stranger = Person(person.lab, tmp_path / "home", tmp_path)
    shown = stranger.types("doctor", str(person.lab.inventory), "--nodes", "alpha,beta").stdout
    assert "connections between hosts" in shown
    assert "not applicable" in shown.splitlines()[-1]
    assert stranger.types("clusters").stdout == ""


def test_a_firewall_between_two_hosts_is_told_from_one_that_closes_some_ports(person):
    with (
        filtered(person, "gamma", "ip saddr 10.77.31.2 drop"),
        filtered(person, "beta", "ip saddr 10.77.31.1 tcp dport > 1024 ct state new drop"),
    ):
        found = person.asks("doctor", exit_code=1)
    expected = dict.fromkeys(ways(found), "open")
    # What beta sends to gamma is dropped there: its requests, and its answers to gamma's.
    expected |= {("beta", "gamma"): "silent", ("gamma", "beta"): "silent", ("alpha", "beta"): "filtered"}
    assert ways(found) == expected
    assert {("P14", "beta", "gamma"), ("P14", "gamma", "beta"), ("P14", "alpha", "beta")} <= blocking(found)
    remedy = next(one["remedy"] for one in found["findings"] if one["where"] == ["beta", "gamma"])
    assert "is a firewall on gamma? Open all TCP ports" in remedy
    assert "10.77.31.0/30" in remedy


def test_a_firewall_that_refuses_is_named_as_such_and_the_way_to_the_master_by_its_own_name(person):
    with filtered(person, "alpha", "ip saddr 10.77.31.3 tcp dport > 1024 ct state new reject with tcp reset"):
        found = person.asks("doctor", exit_code=1)
    assert blocking(found) == {("P13", "gamma", "alpha")}
    assert ways(found)["gamma", "alpha"] == "refused"


def test_a_link_that_loses_large_packets_is_found_by_what_passes(person):
    """Between the hosts alone: else no request of ours comes to it, either."""
    with filtered(person, "gamma", "ip saddr { 10.77.31.1, 10.77.31.2 } meta length > 1400 drop"):
        found = person.asks("doctor", exit_code=1)
    broken = {way for way, kind in ways(found).items() if kind == "small only"}
    assert broken == {("alpha", "gamma"), ("gamma", "alpha"), ("beta", "gamma"), ("gamma", "beta")}
    assert {("P19", *way) for way in broken} <= blocking(found)
    assert ways(found)["alpha", "beta"] == "open"


def test_a_host_that_is_off_is_named_and_the_others_are_shown_all_the_same(person):
    person.lab.power("gamma", "off")
    try:
        done = person.types("doctor", exit_code=3)
        found = person.asks("doctor", exit_code=3)
    finally:
        person.lab.power("gamma", "on")
    assert "block: P01 login, gamma: " in done.stdout
    assert found["hosts"] == ["alpha", "beta"]
    assert ways(found) == {("alpha", "beta"): "open", ("beta", "alpha"): "open"}
    assert blocking(found) == {("P01", "gamma")}


def test_a_controller_that_is_killed_leaves_no_listener(person):
    run = person.starts("doctor")
    try:
        deadline = time.monotonic() + 60
        while not (found := [node for node in ("alpha", "beta", "gamma") if listening(person, node)]):
            assert run.poll() is None, run.stdout.read()
            assert time.monotonic() < deadline
        assert found
    finally:
        run.kill()
        run.communicate()
    deadline = time.monotonic() + 70
    while left := [node for node in ("alpha", "beta", "gamma") if listening(person, node)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


SICK = """
cluster: smoke
defaults: {device: cpu, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.33.1, master: true}
  - {name: beta, host: 10.77.33.2}
  - {name: gamma, host: 10.77.33.3, prepare: "test ! -e /home/lab/sick"}
"""


def test_an_all_reduce_that_fails_with_one_host_alone_blames_that_host(tmp_path):
    """Nothing that a check can see: what has to be run before its ranks fails there."""
    with lab(SICK, trains=True) as hosts:
        person = Person(hosts, tmp_path / "home", tmp_path)
        assert (
            "needs a cluster that is up"
            in person.types("doctor", str(hosts.inventory), "--collective", exit_code=2).stderr
        )
        person.types("up", str(hosts.inventory))
        assert "P23" in person.asks("doctor", "--collective")["passed"]
        hosts.host_exec("gamma", ["touch", "/home/lab/sick"], check=True)
        found = person.asks("doctor", "--collective", exit_code=1)
        (finding,) = [one for one in found["findings"] if one["id"] == "P23"]
        assert finding["where"] == ["gamma"]
        assert "an all-reduce by gloo fails, but works without that host: gamma: " in finding["seen"]
        assert person.types("doctor", "--nodes", "alpha,beta").returncode == 0
        assert {job["state"] for job in person.asks("jobs")["jobs"]} == {"succeeded", "failed"}
