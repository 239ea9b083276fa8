"""`--retries` over real SSH: the master's host loses its power in mid-run, and the job goes on without it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.lab import Lab, lab
from tests.support.sshd import wait_for
from tests.support.terminal import Person, until_said

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

INVENTORY = """
cluster: retries
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.31.1}
  - {name: beta, host: 10.77.31.2}
  - {name: gamma, host: 10.77.31.3}
"""
UPDATES = 100
SETTINGS = ["data=synthetic", "samples=120", "batch=12", f"steps={UPDATES}", "epochs=100", "eval_every=0"]
SETTINGS += ["num_workers=0", "checkpoint_every=5"]
SLOW = "slow=rank:0,at:start,ms:100"


def options(*settings: str) -> list[str]:
    return [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]


def newest(standing: Lab, node: str, job: str) -> str:
    """The checkpoint's name; "" where there is none."""
    listed = standing.host_exec(node, ["ls", f".orch/jobs/{job}/checkpoints"], as_user=True).stdout.split()
    return listed[-1] if listed else ""


def weights(standing: Lab, node: str, job: str, folder: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint that a job wrote there."""
    path = f"/home/lab/.orch/jobs/{job}/checkpoints/step-{UPDATES:09}.pt"
    content = standing.host_exec(node, ["cat", path], text=False).stdout
    (folder / "last.pt").write_bytes(content)
    found = torch.load(folder / "last.pt", weights_only=True)
    return {**found["model"], **{f"momentum {n}": one for n, one in enumerate(found["optimizer"]["momentum_buffer"])}}


@pytest.mark.skipif(not os.environ.get("ORCH_LONG"), reason="two minutes of lost hosts: ORCH_LONG=1")
def test_without_its_master_a_job_goes_on_from_the_copy_of_its_last_checkpoint(tmp_path: Path) -> None:
    with lab(INVENTORY, trains=True) as rack:
        (tmp_path / "work").mkdir()
        person = Person(rack, tmp_path / "home", tmp_path / "work")
        person.types("up", str(rack.inventory))
        master = person.asks("status")["cluster"]["master"]
        run = person.starts("run", "--json", "--exp", "mnist_lenet", *options(SLOW), "--retries", "1")
        shown, job = until_said(run, "epoch 1"), person.asks("jobs")["jobs"][0]["id"]
        plan = json.loads((tmp_path / "home" / "jobs" / job / "plan.json").read_text())
        assert plan["checkpoints"][0] == plan["master"] == master
        second = plan["checkpoints"][1]
        wait_for(lambda: newest(rack, second, job) >= "step-000000020.pt", "a copy of update 20", timeout_s=60)

        rack.power(master, "off")
        shown += run.communicate(timeout=240)[0]
        assert run.returncode == 0, shown
        first, last = sorted(person.asks("jobs")["jobs"], key=lambda one: one["attempt"]["number"])
        assert (first["state"], first["first_failure"]["node"]) == ("failed", master), shown
        assert (last["state"], sorted([*last["nodes"], master])) == ("succeeded", ["alpha", "beta", "gamma"])
        assert last["nodes"][0] == second and last["attempt"]["earlier"][0]["job"] == job
        begun = shown.split("going on from ")[1].split(" updates")[0]
        assert begun.startswith(f"/home/lab/.orch/jobs/{job}/checkpoints after ")
        assert int(begun.split()[-1]) == int(newest(rack, second, job)[5:14]) >= 20

        alone = person.asks("run", "--resume", job, "--nodes", ",".join(last["nodes"]), "--set", "slow=")
        assert f"after {begun.split()[-1]} updates" in person.types("logs", "--job", alone["id"]).stdout
        ends = [weights(rack, second, one, tmp_path) for one in (last["id"], alone["id"])]
        assert ends[0].keys() == ends[1].keys()
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])

        person.types("collect", "--job", last["id"], "--out", str(tmp_path / "runs"))
        assert f"failed before: {job} ({master}: " in (tmp_path / "runs" / last["id"] / "report.html").read_text()
