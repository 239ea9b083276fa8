"""What a job makes of a broken network and a dead master, as a person who follows it sees it: a lab of three hosts."""

from __future__ import annotations

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
