"""Going on from a checkpoint over real SSH: a job that was ended in its middle, on hosts with disks of their own."""

from __future__ import annotations

import time

import pytest

from tests.support.lab import lab
from tests.support.terminal import Person

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

INVENTORY = """
cluster: resume
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.9.1}
  - {name: beta, host: 10.77.9.2}
"""
SETTINGS = ["data=synthetic", "samples=640", "epochs=50", "eval_every=0", "num_workers=0", "checkpoint_every=3"]
SLOW = "slow=rank:0,at:start,ms:100"


def test_a_job_that_was_ended_goes_on_where_its_checkpoint_is(tmp_path):
    with lab(INVENTORY, trains=True) as pair:
        (tmp_path / "work").mkdir()
        person = Person(pair, tmp_path / "home", tmp_path / "work")
        person.types("up", str(pair.inventory))
        holder = person.asks("status")["cluster"]["master"]
        (other,) = {"alpha", "beta"} - {holder}
        sets = [word for setting in (*SETTINGS, SLOW) for word in ("--set", setting)]
        job = person.types("run", "--detach", "--exp", "mnist_lenet", *sets).stdout.strip()

        folder = f".orch/jobs/{job}/checkpoints"
        deadline = time.monotonic() + 120
        while "step-" not in pair.host_exec(holder, ["ls", folder], as_user=True).stdout:
            assert time.monotonic() < deadline, "no checkpoint came"
            time.sleep(0.2)
        person.types("cancel", "--job", job)
        newest = pair.host_exec(holder, ["ls", folder], as_user=True).stdout.split()[-1]

        person.types("master", other)
        updates = int(newest[5:14])
        more = ["--set", "slow=", "--set", f"steps={updates + 5}"]
        found = person.asks("run", "--resume", job[:-1], *more)
        assert found["state"] == "succeeded"
        said = person.types("logs", "--job", found["id"], "--node", holder).stdout
        assert f"/{folder}/{newest} after {updates} updates" in said
        assert f"step {updates + 5}/{updates + 5}" in said
