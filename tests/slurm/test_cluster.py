"""A Slurm cluster from home: its inventory, plans, profiles, and jobs that a lost home finds again."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from tests.slurm.conftest import A2000, V100, Person
from tests.slurm.test_jobs import SCRIPT
from tests.support.slurm_lab import slurm_lab

ODD = "a2000:a2000:1:1:- both:a16+l4:1:1:- plain:any:4:2:- gone:v100:1:1:-"


def test_init_writes_what_up_takes(tmp_path):
    """S2: GPUs without a type, two types in a host, hosts that are down; then a job on all other hosts."""
    with slurm_lab(NODES=ODD) as lab:
        lab.on("login", "scontrol", "update", "NodeName=gone", "State=DOWN", "Reason=fan")
        person = Person(lab, tmp_path)
        config = tmp_path / "ssh_config"
        config.write_text(f"Host {lab.network}.1\n IdentityFile {lab.folder}/ssh/id.{lab.user}\n")
        words = ["init", "--from", "slurm", lab.login, "hpc.yaml", "--accept-new-host-keys"]
        out = person(*words, ORCH_SSH_CONFIG=str(config))
        assert "gone: is down now (fan" in out
        assert "both: left out, it has two kinds of GPU (1 a16 and 1 l4)" in out
        assert "hpc.yaml: 3 types of host; then `orch up hpc.yaml`" in out
        written = yaml.safe_load((tmp_path / "hpc.yaml").read_text())
        gres = {node["name"]: node["slurm"]["gres"] for node in written["nodes"]}
        assert gres == {"a2000": "gpu:a2000:1", "gpu": "gpu:4", "v100": "gpu:v100:1"}

        written["engine"]["slurm"]["workdir"] = f"{lab.work}/orch"
        written["defaults"] |= {"python": lab.python, "device": "cpu", "interface": "eth0", "bandwidth": "2.5Gbps"}
        (tmp_path / "hpc.yaml").write_text(yaml.safe_dump(written))
        out = person("up", "hpc.yaml", ORCH_SSH_CONFIG=str(config))
        assert "v100: no host of this type is up now (down)" in out
        (tmp_path / "train.py").write_text(SCRIPT)
        out = person("run", "--nodes", "a2000,gpu", "train.py", "2", ORCH_SSH_CONFIG=str(config))
        assert re.search(r"rank \d on a2000 GPU 0", out)
        assert re.search(r"rank \d on plain GPU 0,1,2,3", out)


def test_a_home_that_has_lost_its_records_finds_queued_running_and_ended_jobs(person):
    """`orch jobs --rescan` asks the login host, and reports a running job as running; none of another home's queued."""
    person.up(V100, A2000)
    (person.folder / "train.py").write_text(SCRIPT)
    person("run", "train.py", "2")
    person("run", "--detach", "train.py", "3000")
    person.until(lambda: person.state() == "running")
    person("run", "--detach", "train.py", "2")
    person.until(lambda: "(Resources)" in person("jobs"))
    known = [(job["id"], job["state"]) for job in person.jobs()]
    path = person.folder / "home/jobs" / known[2][0] / "job.json"  # as if NFS had still hidden its start at its end
    record = json.loads(path.read_text())
    lost = {"state": "lost", "slurm": {**record["slurm"], "hosts": {}, "is_over": True}}
    path.write_text(json.dumps({**record, **lost}))
    assert known[2][0] in person("jobs", "--rescan")
    assert [(job["id"], job["state"]) for job in person.jobs()] == known
    os.rename(person.folder / "home/jobs", person.folder / "home/lost")
    assert person.jobs() == []
    assert known[0][0] in person("jobs", "--rescan")
    assert [state for _, state in known] == ["queued", "running", "succeeded"]
    assert sorted((job["id"], job["state"]) for job in person.jobs()) == sorted(known)
    os.rename(person.folder / "home/jobs", person.folder / "home/again")
    os.rename(person.folder / "home/owner.json", person.folder / "home/before.json")
    assert f"{known[0][0]} of " in person("jobs", "--rescan")
    assert known[0][0] not in [job["id"] for job in person.jobs()]
    person("down", "--yes", "--discard", code=None)
    assert person.lab.exec("squeue", "-h").count("train-20") == 4  # it ended no job of the other home
    os.rename(person.folder / "home/before.json", person.folder / "home/owner.json")
    person("up", "hpc.yaml")
    person("jobs", "--rescan")
    for job, _ in known[:2]:
        assert "cancelled" in person("cancel", "--job", job)


SLOW = {"samples_per_s": 60, "fixed_ms": 20}


def test_a_profile_by_type_and_shares_and_plans_by_it(person):
    """S4: batches are split by measured speed, also for jobs whose hosts are not known yet."""
    person.up({**V100, "paced": {**SLOW, "samples_per_s": 150}}, {**A2000, "paced": SLOW})
    exp = ["--exp", "mnist_lenet", "--set", "data=synthetic", "--set", "batch=70"]
    declared = person("plan", *exp, "--set", "device=cuda")
    assert "estimates from the hardware catalogue" in declared
    measured = json.loads(person("profile", *exp, "--set", "profile_s=4", "--json").partition("\n}\n")[0] + "\n}")
    assert {rank["node"]: rank["fresh"] for rank in measured["ranks"]} == {"v100": True, "a2000": True}
    assert person.jobs() == []
    assert [*(person.lab.work / person.folder.name / "submitted").iterdir()] == []
    plan = json.loads(person("plan", *exp, "--json"))
    assert {host["name"]: host["speed_from"] for host in plan["hosts"]} == {"v100": "profile", "a2000": "profile"}
    assert plan["best"]["exact"]["shares"] == pytest.approx([50, 20], abs=2)
    assert "--nodes v100,a2000" in person("plan", *exp)
    person("run", *exp, "--set", "steps=5")
    person("collect")
    (path,) = (person.folder / "runs").glob("*/plan.json")
    shares = {node["name"]: sum(node["shares"]) for node in json.loads(path.read_text())["nodes"]}
    assert shares["v100"] == pytest.approx(50, abs=2)
    assert sum(shares.values()) == 70


def test_torchx_submits_a_job_and_sees_it_wait_and_end(person):
    pytest.importorskip("torchx", reason="needs TorchX: pip install -e '.[torchx]'")

    def torchx(*words):
        line = [sys.executable, "-m", "torchx.cli.main", *words]
        done = subprocess.run(
            line, cwd=person.folder, env=person.environment({}), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    person.up(V100)
    (person.folder / "train.py").write_text(SCRIPT)
    held = person.lab.exec("sbatch", "--parsable", "--chdir=/tmp", "--gres=gpu:v100:1", "--wrap=sleep 300").strip()
    person.until(lambda: person.slurm_state(held) == "RUNNING")
    handle = torchx("run", "-s", "orch", "dist.ddp", "--script", "train.py", "--", "3").strip()
    assert "State: PENDING" in torchx("status", handle)
    person.lab.exec("scancel", held)
    person.until(lambda: "State: SUCCEEDED" in torchx("status", handle))
    assert "step 2 1" in torchx("log", handle)
    stays = torchx("run", "-s", "orch", "dist.ddp", "--script", "train.py", "--", "3000").strip()
    torchx("cancel", stays)
    assert "State: CANCELLED" in torchx("status", stays)
