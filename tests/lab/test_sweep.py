"""A sweep over real SSH: a host loses its power in the middle, and its job runs on another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.lab import lab
from tests.support.sshd import wait_for
from tests.support.terminal import Person, until_said

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

INVENTORY = """
cluster: sweep
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: quick, host: 10.77.32.1, paced: {samples_per_s: 800}}
  - {name: slow, host: 10.77.32.2, paced: {samples_per_s: 200}}
"""
SETTINGS = ["data=synthetic", "samples=100000", "epochs=100", "batch=64", "eval_every=0", "num_workers=0"]
STEPS = (20, 40, 80, 160)


def test_jobs_of_a_host_without_power_run_on_another_and_it_takes_part_again(tmp_path: Path) -> None:
    with lab(INVENTORY, quick=True, trains=True) as hosts:
        person = Person(hosts, tmp_path / "home", tmp_path)
        person.types("up", str(hosts.inventory))
        words = [word for setting in SETTINGS for word in ("--set", setting)]
        words += ["--grid", f"steps={','.join(map(str, STEPS))}", "--exp", "mnist_lenet"]
        planned = person.asks("sweep", "--dry-run", *words)["planned"]
        longest = next(each for each in planned if each["trial"] == len(STEPS))
        assert longest["slot"] == "quick" and longest["start_s"] == 0.0, "the longest first, on the faster host"

        sweep = person.starts("sweep", *words)
        try:
            until_said(sweep, f"steps={STEPS[-1]}: runs on quick")
            wait_for(lambda: _step(person, f"-{len(STEPS):03d}") > 0, "the longest job's first step", 120)
            hosts.power("quick", "off")
            said = until_said(sweep, "quick is left out for now")
            hosts.power("quick", "on")
            said += sweep.communicate(timeout=300)[0]
        finally:
            sweep.kill()
            sweep.communicate()
        assert sweep.returncode == 0, said

        record = json.loads(next((tmp_path / "home/sweeps").glob("*/sweep.json")).read_text())
        assert [trial["state"] for trial in record["trials"]] == ["succeeded"] * len(STEPS)
        (longest,) = [trial for trial in record["trials"] if trial["lost"]]
        assert longest["values"]["steps"] == str(STEPS[-1])
        assert longest["job"] == f"{longest['lost'][0]}-2"
        assert not person.processes_of(longest["lost"][0]), "what ran on the host is gone"


def _step(person: Person, ends: str) -> int:
    """The last step that the controller has seen of this job."""
    for line in person.types("top", "--once", "--json", exit_code=None).stdout.splitlines():
        job = json.loads(line)
        if job["job"].endswith(ends):
            return int(job["step"] or 0)
    return 0
