"""Jobs of a person at home on a real Slurm cluster: submitted, followed, ended."""

import importlib.util
import json
import os
import pwd
import re
import threading
import time
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.provision.test_setup import wheel
from tests.slurm.conftest import A16, A2000, V100, Person
from tests.support.trainer_ranks import real_mnist
from tests.support.watching import unchanged

LOGS = ("stdout.log", "stderr.log", "metrics.jsonl")

SCRIPT = """import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
who = f"rank {os.environ['RANK']} on {os.uname().nodename} GPU {os.environ.get('CUDA_VISIBLE_DEVICES')}"
print(who, [name for name in os.environ if name.startswith("SLURM")], flush=True)
for step in range(int(sys.argv[1])):
    total = torch.ones(1)
    dist.all_reduce(total)
    print("step", step, int(total), flush=True)
    if sys.argv[2:] == [os.environ["RANK"]] and step == 5:
        raise SystemExit(f"rank {os.environ['RANK']} gives up")
    time.sleep(0.1)
"""


def test_unequal_hosts_of_two_partitions_are_one_job(person):
    """S4: each rank sees only the GPUs that Slurm gave, and no variable of a Slurm step."""
    assert "declared by Slurm: idle" in person.up(V100, A16)
    (person.folder / "train.py").write_text(SCRIPT)
    text = person("run", "--dry-run", "train.py", "3")
    assert text.count("#SBATCH hetjob") == 1
    assert "#SBATCH --partition=urgent" in text
    out = person("run", "train.py", "3")
    for line in ("rank 0 on a16 GPU 0,1 []", "rank 1 on a16 GPU 0,1 []", "rank 2 on v100 GPU 0 []", "step 2 3"):
        assert line in out
    (job,) = person.jobs()
    assert (job["state"], job["exit_code"], sorted(job["nodes"])) == ("succeeded", 0, ["a16", "v100"])
    person("collect")
    person("down", "--yes")
    assert not (person.lab.work / person.folder.name).exists()


def test_a_rank_that_fails_is_named_and_no_process_is_left(person):
    """S6."""
    person.up(V100, A2000)
    (person.folder / "train.py").write_text(SCRIPT)
    out = person("run", "train.py", "100", "1", code=1)
    assert "rank 1 gives up" in out
    (job,) = person.jobs()
    assert (job["state"], job["first_failure"]["rank"]) == ("failed", 1)
    assert "FAILED" in person.lab.exec("scontrol", "show", "job", "-o", "1") + person.lab.exec(
        "scontrol", "show", "job", "-o"
    )
    assert [line for node in ("v100", "a2000") for line in person.lab.processes(node)] == []


def test_a_job_that_waits_is_listed_with_slurms_reason_and_taken_out(person):
    person.up({**V100, "most": 1})
    (person.folder / "train.py").write_text(SCRIPT)
    held = person.lab.exec("sbatch", "--parsable", "--chdir=/tmp", "--gres=gpu:v100:1", "--wrap=sleep 300").strip()
    person.until(lambda: person.slurm_state(held) == "RUNNING")
    job = person("run", "--detach", "train.py", "9").splitlines()[0]
    person.until(lambda: "(Resources)" in person("jobs"))
    assert f"{job} waits in Slurm's queue: job" in person("logs", job, code=2)
    assert "cancelled" in person("cancel", "--job", job)
    assert person.state() == "cancelled"
    assert person.lab.exec("squeue", "-h", "-o", "%A").split() == [held]


def test_a_job_outlives_the_controller_at_home(person):
    """S5: killed while it waits, and while it runs."""
    person.up(V100)
    go = person.lab.work / f"go-{person.folder.name}"
    gate = f"    while step == 9 and not os.path.exists({str(go)!r}):\n        time.sleep(0.1)\n"
    (person.folder / "train.py").write_text(SCRIPT.replace("    time.sleep(0.1)\n", gate))
    home = person.begun("run", "train.py", "60")
    person.until(lambda: bool(person.lab.exec("squeue", "-h").strip()))
    home.kill()
    home.communicate()
    person.until(lambda: person.printed("step 9 "))
    assert person.state() == "running"
    assert "v100" in person("ssh", "v100", "--", "hostname")
    follows = person.begun("logs", "-f", "latest")
    assert follows.stdout
    assert any("step 9 " in line for line in follows.stdout)
    follows.kill()
    follows.communicate()
    person.lab.exec("touch", str(go))
    person.until(lambda: person.state() == "succeeded")
    person("collect")
    log = next((person.folder / "runs").glob("*/nodes/v100/rank-0/stdout.log")).read_text()
    assert log.count("step ") == 60


LOCAL = """import os, pathlib, greeting
own = pathlib.Path(os.environ["TMPDIR"])
text = (own / "birds/a.txt").read_text()
print("local", own.parent, oct(own.stat().st_mode & 0o777), text, greeting.TEXT, flush=True)
"""


def test_a_job_gets_its_packages_data_and_a_local_folder_and_reports_its_end(person):
    """Packages and data by way of the login host; TMPDIR on the host's own disk, removed at the end."""
    work, told = person.lab.work, person.lab.work / "told"
    (person.folder / "birds").mkdir()
    (person.folder / "birds/a.txt").write_text("blackbird")
    (person.folder / "train.py").write_text(LOCAL)
    person.lab.exec("mkdir", "-p", str(work / "wheels"))
    wheel(work / "wheels", "greeting", "1.0", {"greeting/__init__.py": "TEXT = 'hello'\n"})
    (person.folder / "r.txt").write_text(f"--no-index\n--find-links {work}/wheels\ngreeting==1.0\n")
    brings = {"prepare": f'cp -r {work}/data/birds "$TMPDIR"'}
    person.up({**V100, **brings}, scratch="/nowhere/there")
    assert "is complete; 1 file" in person("data", "push", "birds", "--to", f"{work}/data/birds")
    assert "birds: 1 file" in person("data", "list", f"{work}/data")
    assert "--nodes does not work on Slurm" in person("data", "list", "--nodes", "v100", code=2)
    assert re.search(r"1[0-9] checks passed", person("doctor"))
    notify = f'echo "$ORCH_STATE $ORCH_EXIT_CODE" >{told}'
    person("run", "--detach", "--notify", notify, "train.py")
    person.until(told.exists)
    person.until(lambda: person.state() == "failed")
    assert "v100: /nowhere/there/orch-" in person("logs", code=2)
    assert told.read_text() == "failed 1\n"
    told.unlink()

    person.up({**V100, **brings}, scratch="/tmp")
    job = person("run", "--wait", "--detach", "--notify", notify, "--requirements", "r.txt", "train.py").splitlines()[0]
    person.until(told.exists)
    person.until(lambda: person.state() == "succeeded")
    assert told.read_text() == "succeeded 0\n"
    assert "local /tmp 0o700 blackbird hello" in person("logs", job)
    person.until(lambda: not person.lab.exec("squeue", "-h").strip(), 60)
    assert not re.search(r"orch-\d", person.lab.on("v100", "ls", "/tmp"))  # orch-UID-JOB.HOST
    person("data", "remove", "--yes", f"{work}/data/birds")
    assert not (work / "data/birds").exists()
    person("down", "--yes", "--discard")
    assert not (work / person.folder.name).exists()


def test_what_is_cancelled_has_ended_everywhere(person):
    """S7: by orch, and by Slurm's own scancel; a webhook gets both ends."""
    person.up(V100, A2000)
    (person.folder / "train.py").write_text(SCRIPT)
    told = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer((f"{person.lab.network}.254", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hook = ["--notify", f"http://{person.lab.network}.254:{server.server_port}/"]
    assert "--notify URL reports each attempt's end" in person("run", *hook, "--retries", "1", "train.py", code=2)
    for number, end in enumerate(
        (lambda: person("cancel", "--yes"), lambda: person.lab.exec("scancel", person.slurm_job()))
    ):
        person("run", "--detach", *hook, "train.py", "3000")
        person.until(lambda: person.state() == "running")
        end()
        person.until(lambda: not person.lab.exec("squeue", "-h").strip(), 60)
        assert [job["state"] for job in person.jobs()] == ["cancelled"] * (number + 1)
        assert [line for node in ("v100", "a2000") for line in person.lab.processes(node)] == []
        records = (person.lab.work / person.folder.name / "nodes").glob("*/jobs/*/agent.json")
        assert all("ended" in json.loads(path.read_text()) for path in records)
    server.shutdown()
    server.server_close()
    assert [each["job"] for each in told] == [job["id"] for job in reversed(person.jobs())]


def test_a_cancel_of_an_earlier_attempt_leaves_its_retry_alone(person):
    """Both are of one job of Slurm's."""
    person.up(V100)
    (person.folder / "train.py").write_text(SCRIPT)
    mark = person.lab.work / f"tried-{person.folder.name}"
    once = f"if not os.path.exists({str(mark)!r}):\n    open({str(mark)!r}, 'w').close()\n    sys.exit(7)\n"
    (person.folder / "train.py").write_text(SCRIPT.replace("for step", once + "for step", 1))
    person("run", "--detach", "--retries", "1", "--retry-on", "any", "--retry-wait", "1s", "train.py", "3000")
    person.until(lambda: person.printed("step 3 "))
    newest, oldest = person.jobs()
    assert (newest["state"], oldest["state"]) == ("running", "failed")
    out = person("cancel", "--job", oldest["id"])
    assert f"goes on with {newest['id']}: `orch cancel --job {newest['id']}`" in out
    assert person.state() == "running"
    person("cancel", "--job", newest["id"])
    assert person.state() == "cancelled"
    person.until(lambda: not person.lab.exec("squeue", "-h").strip(), 60)


def test_a_suspended_job_keeps_its_state(person):
    person.up(V100)
    (person.folder / "train.py").write_text(SCRIPT)
    person("run", "--detach", "train.py", "3000")
    person.until(lambda: person.printed("step 3 ") and person.state() == "running")
    job = person.slurm_job()
    person.lab.on("v100", "scontrol", "suspend", job)
    said = person("jobs")
    assert "running" in said and f"Slurm has suspended job {job}" in said
    person.lab.on("v100", "scontrol", "resume", job)
    person("cancel", "--yes")
    assert person.state() == "cancelled"


def test_slurms_time_limit_ends_a_job_with_its_reason(person):
    """S7."""
    person.up(V100, time="3")
    (person.folder / "train.py").write_text(SCRIPT)
    began_s = time.monotonic()
    out = person("run", "train.py", "3000", code=1)
    assert time.monotonic() - began_s < 170  # asked to end two minutes before
    (job,) = person.jobs()
    assert (job["state"], job["first_failure"]["kind"]) == ("failed", "time"), out
    assert "time limit" in out


def test_a_job_that_is_pre_empted_goes_on_from_its_checkpoint_to_the_same_bit(person):
    """S8."""
    person.up(V100, A2000)
    line = ["run", "--exp", "mnist_lenet", "--set", "data=synthetic", "--set", "steps=400", "--set", "eval_every=0"]
    line += ["--set", "checkpoint_every=50"]
    person(*line)
    undisturbed = _losses(person, person.jobs()[0]["id"])
    before = _checkpoints(person, "*")
    follows = person.begun(*line)
    person.until(lambda: _checkpoints(person, "*") != before, pause_s=0.05)
    taken = person.slurm_job()
    urgent = person.lab.exec(
        "sbatch",
        "--parsable",
        "--chdir=/tmp",
        "--partition=urgent",
        "--nodelist=v100",
        "--gres=gpu:v100:1",
        "--wrap=sleep 5",
    ).strip()
    person.until(lambda: person.slurm_state(urgent) in ("RUNNING", "COMPLETING", "COMPLETED"))
    person.until(lambda: person.slurm_state(taken) == "PENDING")
    person.lab.exec("scontrol", "update", f"JobId={taken}", "StartTime=now")
    out = follows.communicate(timeout=200)[0]
    assert follows.returncode == 0, out
    second, first, _ = person.jobs()
    assert (first["state"], second["state"]) == ("failed", "succeeded"), out
    assert first["first_failure"]["kind"] == "slurm"
    resumed = _losses(person, second["id"])
    assert 0 < min(resumed) <= 400
    assert resumed.items() <= undisturbed.items()
    assert max(resumed) == max(undisturbed)


def _checkpoints(person, job):
    return [*(person.lab.work / person.folder.name / "nodes").glob(f"*/jobs/{job}/checkpoints/step-*.pt")]


def _losses(person, job):
    """By step, of rank 0."""
    (path,) = (person.lab.work / person.folder.name / "nodes").glob(f"*/jobs/{job}/rank-0/metrics.jsonl")
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    return {step["step"]: step["loss"] for step in steps if step.get("event") == "step"}


def test_a_host_that_loses_power_is_named_and_the_job_goes_on_without_it(person):
    """S9: within the same Slurm job, from the last checkpoint."""
    person.up({"name": "any", "ranks": 1, "slurm": {"nodelist": "v100,a2000"}})
    line = ["run", "--nodes", "2xany", "--retries", "1", "--retry-wait", "1s", "--exp", "mnist_lenet"]
    line += ["--set", "data=synthetic", "--set", "steps=300", "--set", "eval_every=0", "--set", "checkpoint_every=50"]
    before = _checkpoints(person, "*")
    follows = person.begun(*line)
    person.until(lambda: _checkpoints(person, "*") != before, pause_s=0.05)
    try:
        person.lab.crash("v100")  # the batch step runs on the first host of the alphabet
        out = follows.communicate(timeout=250)[0]
    finally:
        person.lab.reboot("v100")
    again, before = person.jobs()
    assert (before["state"], before["first_failure"]["node"]) == ("failed", "v100"), out
    assert (again["state"], again["nodes"]) == ("succeeded", ["a2000"]), out
    (log,) = (person.lab.work / person.folder.name / "submitted").glob("*/slurm.log")
    assert "goes on after update" in log.read_text()
    (person.folder / "train.py").write_text(SCRIPT)
    out = person("run", "--nodes", "2xany", "train.py", "3")
    assert "on v100" in out
    assert "on a2000" in out


def test_two_people_on_one_host_see_only_their_own(person, tmp_path_factory):
    """S10: each has one of its two GPUs at the same time."""
    half = {"name": "a16", "gpu": "A16", "gpus": 1, "ranks": 1, "slurm": {"gres": "gpu:a16:1"}}
    people = [person, Person(person.lab, tmp_path_factory.mktemp("other"))]
    for each in people:
        each.up(half)
        (each.folder / "train.py").write_text(SCRIPT)
    runs = [each.begun("run", "train.py", "150") for each in people]
    for each in people:
        each.until(lambda each=each: each.printed("step 2 "))
    mine, theirs = ([job["id"] for job in each.jobs()] for each in people)
    assert len(mine) == len(theirs) == 1
    assert mine != theirs
    outs = [run.communicate(timeout=200)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outs
    assert {out.partition("GPU ")[2][0] for out in outs} == {"0", "1"}


FRAMEWORKS = os.environ.get("ORCH_TEST_FRAMEWORKS", "")
"""A folder into which `pip install --no-deps --target FOLDER` has put Lightning, Accelerate and the rest."""


@pytest.mark.parametrize(("name", "package"), [("light", "lightning"), ("accel", "accelerate")])
def test_unchanged_scripts_of_frameworks_train_over_unequal_hosts(person, name, package):
    """S12: they read torchrun's variables, and see none of a Slurm step, which would win over them."""
    if not (Path(FRAMEWORKS, package).is_dir() if FRAMEWORKS else importlib.util.find_spec(package)):
        pytest.skip(f"needs {package}: pip install -e '.[frameworks]', or ORCH_TEST_FRAMEWORKS=FOLDER")
    person.up(V100, A2000)
    (person.folder / "train.py").write_text(unchanged(name))
    out = person("run", *(["--env", f"PYTHONPATH={FRAMEWORKS}"] if FRAMEWORKS else []), "train.py")
    assert out.count("ranks 2") == 2, out
    assert len(set(re.findall(r"weights (\S+)", out))) == 1


SLEEPS = """import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
print("met", flush=True)
if os.environ["RANK"] == "1":
    time.sleep(600)
dist.all_reduce(torch.ones(1))
"""


def test_why_names_the_rank_that_sleeps_and_the_one_that_waits_for_it(person):
    """S12."""
    person.up(V100, A2000)
    (person.folder / "train.py").write_text(SLEEPS)
    person("run", "--detach", "train.py")
    person.until(lambda: person.printed("met"))
    person.until(lambda: "sleep" in person("why", code=None))
    out = person("why", code=None)
    for words in (
        "rank 1 on a2000",
        "train.py:5: time.sleep(600)",
        "rank 0 on v100 waits in a collective at train.py:6",
    ):
        assert words in out


EPOCH = ["run", "--exp", "mnist_lenet", "--set", "epochs=1", "--set", "batch=64"]
OF_THE_TRAINING = ("exp", "model", "data", "batch", "epochs", "strategy", "fidelity", "optimizer", "lr", "seed")
"""Settings that do not depend on what else the machine does."""
OF_THE_RUN = ("experiment", "state", "world_size", "samples_total", "accuracy", "restarts", "first_failure")
OF_A_HOST = ("name", "gpu", "ranks", "batch_per_rank", "valid")


@pytest.mark.skipif(real_mnist() is None, reason="no MNIST; set ORCH_TEST_MNIST to the folder that holds MNIST/raw")
def test_an_epoch_of_mnist_on_unequal_hosts_is_the_same_as_over_ssh(person, tmp_path_factory):
    """S3: the master is the better host, not Slurm's first; home reaches the login host only; every sample once; and
    the same job on the same two hosts over SSH has the same report.
    """
    person.up(A2000, V100)
    for own in sorted((real_mnist() or Path()).glob("MNIST/raw/*-ubyte*")):
        copy = person.lab.work / "data/MNIST/raw" / own.name
        person.lab.exec("mkdir", "-p", str(copy.parent))
        person.lab.exec("cp", str(own), str(copy))
    data = ["--set", f"data_dir={person.lab.work}/data"]
    person(*EPOCH, *data)
    (job,) = person.jobs()
    assert (job["state"], sorted(job["nodes"])) == ("succeeded", ["a2000", "v100"])
    run, plan, summary = _collected(person)
    assert plan["master"] == "v100"
    assert "BatchHost=a2000" in person.lab.exec("scontrol", "show", "job", "-o")
    assert (summary["samples_total"], summary["restarts"]) == (60_000, 0)
    assert summary["accuracy"] > 0.9
    assert "--nodes v100,a2000" in summary["repeat"]
    there = person.lab.work / person.folder.name / "nodes"
    logs = [log for name in LOGS for log in there.glob(f"*/jobs/{job['id']}/rank-*/{name}") if log.stat().st_size]
    assert [log.name for log in logs].count("metrics.jsonl") == 2
    for log in logs:
        pulled = run / "nodes" / log.relative_to(there).parts[0] / log.parent.name / log.name
        assert sha256(pulled.read_bytes()).digest() == sha256(log.read_bytes()).digest()

    ssh = Person(person.lab, tmp_path_factory.mktemp("ssh"))
    ssh.up_by_ssh(A2000, V100)
    ssh(*EPOCH, *data)
    other, plan_there, same = _collected(ssh)
    assert [node["name"] for node in plan_there["nodes"]] == [node["name"] for node in plan["nodes"]]
    assert summary.keys() == same.keys()
    for key in OF_THE_TRAINING:
        assert summary["settings"][key] == same["settings"][key], key
    assert {key: summary[key] for key in OF_THE_RUN} == {key: same[key] for key in OF_THE_RUN}
    hosts = [[{key: node[key] for key in OF_A_HOST} for node in each["nodes"]] for each in (summary, same)]
    assert hosts[0] == hosts[1]
    assert _metrics_losses(run) == _metrics_losses(other)


def _collected(person):
    """The run's folder, its plan and its summary."""
    person("collect")
    (run,) = (person.folder / "runs").iterdir()
    return run, *(json.loads((run / name).read_text()) for name in ("plan.json", "summary.json"))


def _metrics_losses(run):
    """Of every step, by rank."""
    return {
        path.parent.name: [each["loss"] for each in map(json.loads, path.read_text().splitlines()) if "loss" in each]
        for path in run.glob("nodes/*/rank-*/metrics.jsonl")
    }


def test_two_unix_users_cannot_read_each_others_jobs(person, tmp_path_factory):
    """S10: at the same time on one host, each with its own key, GPU, port and token."""
    if person.lab.user == "root":
        pytest.skip("root reads everything")
    other = Person(person.lab.of(f"{person.lab.user}2"), tmp_path_factory.mktemp("other"))
    people = [person, other]
    for each in people:
        each.up({"name": "a16", "gpu": "A16", "gpus": 1, "ranks": 1, "slurm": {"gres": "gpu:a16:1"}})
        (each.folder / "train.py").write_text(SCRIPT)
    runs = [each.begun("run", "--no-preload", "train.py", "150") for each in people]  # torchrun's words stay visible
    for each in people:
        each.until(lambda each=each: each.printed("step 2 "))
    parts = [json.loads(_own(each, "nodes/a16/jobs/*/node.json").read_text()) for each in people]
    for key in ("token", "owner"):
        assert parts[0][key] != parts[1][key]
    lines = person.lab.on("a16", "ps", "-e", "-o", "args=")
    assert not any(part["token"] in lines for part in parts)
    assert len(set(re.findall(r"--master-port (\d+)", lines))) == 2
    for one, two in (people, people[::-1]):
        theirs = [
            _own(two, name) for name in ("submitted", "nodes", "submitted/*/job.sh", "nodes/a16/jobs/*/node.json")
        ]
        uid = pwd.getpwnam(two.lab.user).pw_uid
        for path in (*theirs, f"/tmp/orch-{uid}"):
            assert not _reads(one, path), path
            assert _reads(two, path), path
    outs = [run.communicate(timeout=200)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outs
    assert {out.partition("GPU ")[2][0] for out in outs} == {"0", "1"}


def _own(person, name):
    (path,) = (person.lab.work / person.folder.name).glob(name)
    return path


def _reads(person, path):
    user = ["setpriv", f"--reuid={person.lab.user}", f"--regid={person.lab.user}", "--clear-groups"]
    show = 'if [ -d "$0" ]; then ls "$0"; else cat "$0"; fi >/dev/null 2>&1 && echo yes || echo no'
    return person.lab.on("a16", *user, "sh", "-c", show, str(path)).strip() == "yes"
