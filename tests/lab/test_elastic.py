"""An elastic job over real SSH: a host's link is cut, the others go on, and it stays out when the link heals."""

from __future__ import annotations

import json
import os
import time

import pytest

from tests.support.lab import lab
from tests.support.terminal import Person, until_said

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]

INVENTORY = """
cluster: elastic
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.12.1, master: true}
  - {name: beta, host: 10.77.12.2}
  - {name: gamma, host: 10.77.12.3}
"""
SETTINGS = ["data=synthetic", "samples=120", "batch=12", "epochs=1000", "steps=120", "eval_every=0", "num_workers=0"]
SETTINGS += ["checkpoint_every=5", "slow=rank:0,at:start,ms:100", "shares=alpha=1,beta=1,gamma=1"]
BOUND_S = 60.0


@pytest.mark.skipif(not os.environ.get("ORCH_LONG"), reason="a minute and a half of lost links: ORCH_LONG=1")
def test_two_hosts_go_on_when_the_link_of_a_third_is_cut(tmp_path):
    with lab(INVENTORY) as three:
        (tmp_path / "work").mkdir()
        person = Person(three, tmp_path / "home", tmp_path / "work")
        person.types("up", str(three.inventory))
        sets = [word for setting in SETTINGS for word in ("--set", setting)]
        run = person.starts("run", "--exp", "mnist_lenet", *sets, "--elastic", "2:3")
        shown = until_said(run, "epoch 2")
        job = person.asks("jobs")["jobs"][0]["id"]

        three.link("gamma", "down")
        began = time.monotonic()
        shown += until_said(run, "going on from")
        assert time.monotonic() - began < BOUND_S
        three.link("gamma", "up")
        shown += run.communicate(timeout=120)[0]
        assert run.returncode == 0, shown
        assert "gamma: lost after" in shown
        assert "the job continues without it" in shown

        found = person.job(job)
        assert (found["state"], found["exit_code"], found["first_failure"]) == ("succeeded", 0, None)
        assert [(fault["node"], fault["rank"]) for fault in found["faults"]] == [("gamma", None)]
        assert person.processes_of(job) == []
        assert person.agent("gamma", job)["state"] == "failed"

        person.types("collect", "--job", job, "--out", str(tmp_path / "runs"))
        summary = json.loads((tmp_path / "runs" / job / "summary.json").read_text())
        assert (summary["state"], summary["world_size"], summary["restarts"]) == ("succeeded", 2, 1)
        assert [node["name"] for node in summary["nodes"]] == ["alpha", "beta"]
        assert summary["samples_per_s"] > 0
        page = (tmp_path / "runs" / job / "report.html").read_text()
        assert "Faults that the job survived" in page
        assert "gamma: lost after" in page
