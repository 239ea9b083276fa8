"""What a job makes of a broken network and a dead master, as a person who follows it sees it: a lab of three hosts."""

from __future__ import annotations

import re
import time

import pytest
from lab import lab
from person import Person

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

INVENTORY = """
cluster: wire
defaults: {device: cpu, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.21.1, master: true}
  - {name: beta, host: 10.77.21.2}
  - {name: gamma, host: 10.77.21.3}
"""
# No torch: these tests look at who ends whom.
WAITS = "import os, time\nprint('hello from', os.environ['RANK'], flush=True)\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def person(tmp_path_factory):
    with lab(INVENTORY) as three:
        folder = tmp_path_factory.mktemp("work")
        someone = Person(three, tmp_path_factory.mktemp("home"), folder)
        (folder / "waits").mkdir()
        (folder / "waits" / "waits.py").write_text(WAITS)
        someone.types("up", str(three.inventory))
        yield someone


def until_all_speak(run) -> str:
    """What an `orch run` prints until its three ranks have spoken."""
    shown = ""
    while shown.count("hello from") < 3:
        line = run.stdout.readline()
        assert line, f"it ended before all ranks had spoken: {shown}"
        shown += line
    return shown


FILTER = """
table inet filter
delete table inet filter
table inet filter {
    chain input {
        type filter hook input priority 0; policy %s
        %s
    }
}
"""
ONLY_SSH = FILTER % ("drop", "ct state established,related accept\n iifname lo accept\n tcp dport 22 accept")
OPEN = "sudo nft insert rule inet filter input iifname eth0 ip saddr 10.77.21.0/30 accept"


def filtered(person, node, rules):
    """Puts a firewall up on a host; "" takes it down."""
    person.lab.host_exec(node, ["nft", "-f", "-"], input=rules or "flush ruleset", check=True)


FIREWALLS = {
    "where the ranks will meet": (
        {"alpha": FILTER % ("accept", "tcp dport 29500 drop")},
        r"alpha: (beta|gamma) cannot reach alpha at 10\.77\.21\.1 port 29500, where the ranks will meet",
    ),
    "between two members": (
        {"gamma": FILTER % ("accept", "ip saddr 10.77.21.2 tcp dport > 1024 ct state new drop")},
        r"gamma: beta cannot reach gamma at 10\.77\.21\.3 port \d+, where its supervisor listens",
    ),
    "all but ssh, everywhere": (
        dict.fromkeys(("alpha", "beta", "gamma"), ONLY_SSH),
        r"(beta|gamma): alpha cannot reach (beta|gamma) at 10\.77\.21\.[23] port \d+",
    ),
}


@pytest.mark.parametrize("case", FIREWALLS)
def test_a_firewall_is_named_before_any_rank_starts_with_host_and_port_and_the_line_that_opens_it(person, case):
    rules, says = FIREWALLS[case]
    for node, text in rules.items():
        filtered(person, node, text)
    try:
        began = time.monotonic()
        done = person.types("run", "--", "waits/waits.py", exit_code=1)
        assert time.monotonic() - began < 60, done.stderr
    finally:
        for node in rules:
            filtered(person, node, "")
    assert re.search(f"first cause: {says}", done.stderr), done.stderr
    assert done.stderr.splitlines()[-2].endswith(OPEN)
    assert "hello from" not in done.stdout


def test_a_way_that_breaks_between_two_members_ends_the_job_and_names_both(person):
    """Both still reach the master, and every one of their heartbeats is fine."""
    with person.starts("run", "--", "waits/waits.py") as run:
        until_all_speak(run)
        filtered(person, "beta", FILTER % ("accept", "ip saddr 10.77.21.3 meta length > 1400 drop"))
        began = time.monotonic()
        shown = run.communicate(timeout=120)[0]
        lasted_s = time.monotonic() - began
        filtered(person, "beta", "")
    assert run.returncode == 1, shown
    assert lasted_s < 80, shown
    assert "first cause: gamma: beta and gamma cannot reach each other (small packets pass and large" in shown
    assert person.processes_of(person.asks("jobs")["jobs"][0]["id"]) == []


def test_a_run_ends_with_the_cause_when_the_masters_host_loses_power_and_stays_away(person):
    """The last test of this lab."""
    with person.starts("run", "--", "waits/waits.py") as run:
        until_all_speak(run)
        person.lab.power("alpha", "off")
        began = time.monotonic()
        shown = run.communicate(timeout=120)[0]
        lasted_s = time.monotonic() - began
    assert run.returncode == 1, shown
    assert lasted_s < 75, shown
    assert "alpha: no word any more; what the other hosts know counts" in shown
    assert "first cause: alpha: no word from the master for 20 s" in shown
    job = person.asks("jobs", exit_code=None)["jobs"][0]
    assert (job["state"], job["exit_code"], job["first_failure"]["node"]) == ("failed", 1, "alpha")
