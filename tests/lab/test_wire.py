"""What a job makes of a broken network and a dead master, as a person who follows it sees it.

Most of it is waiting for what does not come, so three cells of three hosts each break at the same time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import yaml

from tests.support.lab import lab
from tests.support.terminal import Person

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

CELLS = 3
LETTERS = ("alpha", "beta", "gamma")
# No torch: these tests look at who ends whom.
WAITS = "import os, time\nprint('hello from', os.environ['RANK'], flush=True)\ntime.sleep(600)\n"


@dataclass(frozen=True)
class Ended:
    """What an `orch run` printed in all, how it ended, and how long after its network broke."""

    shown: str
    exit_code: int
    lasted_s: float


@dataclass(frozen=True)
class Cell:
    """Three hosts that are a cluster of their own: alpha1, its master, beta1 and gamma1."""

    person: Person
    number: int

    @property
    def cluster(self) -> str:
        return f"{self.person.lab.cluster}-{self.number}"

    def run(self, break_it: Callable[[], None]) -> Ended:
        """A job whose network breaks once its three ranks have spoken."""
        with self.person.starts("run", "--cluster", self.cluster, "--", "waits/waits.py") as run:
            shown = ""
            while shown.count("hello from") < len(LETTERS):
                line = run.stdout.readline()
                assert line, f"it ended before all ranks had spoken: {shown}"
                shown += line
            break_it()
            began = time.monotonic()
            shown += run.communicate(timeout=150)[0]
            return Ended(shown, run.returncode, time.monotonic() - began)

    def run_behind(self, rules: dict[str, str]) -> Ended:
        """A job whose hosts have these firewalls from the beginning."""
        for letter, text in rules.items():
            self.filter(letter, text)
        began = time.monotonic()
        done = self.person.types("run", "--cluster", self.cluster, "--", "waits/waits.py", exit_code=None)
        for letter in rules:
            self.filter(letter, "flush ruleset")
        return Ended(done.stdout + done.stderr, done.returncode, time.monotonic() - began)

    def filter(self, letter: str, rules: str) -> None:
        self.person.lab.host_exec(f"{letter}{self.number}", ["nft", "-f", "-"], input=rules, check=True)


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
OPEN = "sudo nft insert rule inet filter input iifname eth0 ip saddr 10.77.21.4/30 accept"
FIREWALLS = {
    "where the ranks will meet": (
        {"alpha": FILTER % ("accept", "tcp dport 29500 drop")},
        r"alpha1: (beta1|gamma1) cannot reach alpha1 at 10\.77\.21\.5 port 29500, where the ranks will meet",
    ),
    "between two members": (
        {"gamma": FILTER % ("accept", "ip saddr 10.77.21.6 tcp dport > 1024 ct state new drop")},
        r"gamma1: beta1 cannot reach gamma1 at 10\.77\.21\.7 port \d+, where its supervisor listens",
    ),
    "all but ssh, everywhere": (
        dict.fromkeys(LETTERS, ONLY_SSH),
        r"(beta1|gamma1): alpha1 cannot reach (beta1|gamma1) at 10\.77\.21\.[67] port \d+",
    ),
}
PARTED = FILTER % ("accept", "ip saddr 10.77.21.11 meta length > 1400 drop")


@pytest.fixture(scope="module")
def person(tmp_path_factory):
    nodes = [
        {"name": f"{letter}{number}", "host": f"10.77.21.{4 * number + place}"}
        for number in range(1, CELLS + 1)
        for place, letter in enumerate(LETTERS, 1)
    ]
    inventory = {"cluster": "wire", "defaults": {"device": "cpu", "env": {"OMP_NUM_THREADS": "1"}}, "nodes": nodes}
    with lab(yaml.safe_dump(inventory), quick=True) as hosts:
        folder = tmp_path_factory.mktemp("work")
        (folder / "waits").mkdir()
        (folder / "waits" / "waits.py").write_text(WAITS)
        yield Person(hosts, tmp_path_factory.mktemp("home"), folder)


@pytest.fixture(scope="module")
def cells(person, tmp_path_factory):
    made, known = [], yaml.safe_load(person.lab.inventory.read_text())
    for cell in (Cell(person, number) for number in range(1, CELLS + 1)):
        nodes = [node for node in known["nodes"] if node["name"].endswith(str(cell.number))]
        nodes[0]["master"] = True
        file = tmp_path_factory.mktemp("inventory") / "cell.yaml"
        file.write_text(yaml.safe_dump({**known, "cluster": cell.cluster, "nodes": nodes}))
        person.types("up", str(file))
        made.append(cell)
    return made


@pytest.fixture(scope="module")
def ended(cells) -> dict[str, Future[Ended]]:
    """By what was broken. The first cell meets one firewall after the other."""
    first, second, third = cells
    with ThreadPoolExecutor(1) as firewalls, ThreadPoolExecutor(2) as others:
        yield {
            **{case: firewalls.submit(first.run_behind, rules) for case, (rules, _) in FIREWALLS.items()},
            "two members": others.submit(second.run, lambda: second.filter("beta", PARTED)),
            "power": others.submit(third.run, lambda: third.person.lab.power("alpha3", "off")),
        }


@pytest.mark.parametrize("case", FIREWALLS)
def test_a_firewall_is_named_before_any_rank_starts_with_host_and_port_and_the_line_that_opens_it(ended, case):
    run = ended[case].result()
    assert run.exit_code == 1, run.shown
    assert run.lasted_s < 60, run.shown
    assert re.search(f"first cause: {FIREWALLS[case][1]}", run.shown), run.shown
    assert run.shown.splitlines()[-2].endswith(OPEN)
    assert "hello from" not in run.shown


def test_a_way_that_breaks_between_two_members_ends_the_job_and_names_both(ended, cells):
    """Both still reach the master, and every one of their heartbeats is fine."""
    run = ended["two members"].result()
    assert run.exit_code == 1, run.shown
    assert run.lasted_s < 80, run.shown
    assert "first cause: gamma2: beta2 and gamma2 cannot reach each other (small packets pass, but large" in run.shown
    (job,) = cells[1].person.asks("jobs", "--cluster", cells[1].cluster)["jobs"]
    assert cells[1].person.processes_of(job["id"]) == []


def test_a_run_ends_with_the_cause_when_the_masters_host_loses_power_and_stays_away(ended, cells):
    run = ended["power"].result()
    assert run.exit_code == 1, run.shown
    assert run.lasted_s < 75, run.shown
    assert "alpha3: no answer; the job's state is as the other hosts report it" in run.shown
    assert "first cause: alpha3: no word from the master for 20 s" in run.shown
    (job,) = cells[2].person.asks("jobs", "--cluster", cells[2].cluster, exit_code=None)["jobs"]
    assert (job["state"], job["exit_code"], job["first_failure"]["node"]) == ("failed", 1, "alpha3")
