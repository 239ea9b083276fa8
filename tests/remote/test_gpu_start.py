"""Somebody else is on a GPU: seen by the real probe, and by the real start of a job. nvidia-smi is a shell script."""

import getpass
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from orchestrator.cli import main
from orchestrator.controller import Controller
from orchestrator.errors import HostsError
from orchestrator.hosts import Cluster, Connections, Node, Occupant, read_facts
from orchestrator.paths import Home
from orchestrator.planning import JobSpec
from orchestrator.remote import occupants, probe
from orchestrator.store import Store
from tests.support.local_job import gang
from tests.support.sshd import wait_for

SLEEPS = "import time\ntime.sleep(600)\n"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """smi(used MiB, processes, mode): an nvidia-smi with one GPU of 16 GiB that is used like this."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(used, processes=(), mode="Default"):
        row = f"0, Tesla V100-PCIE-16GB, GPU-a, 16384, {used}, 525.105.17, 00000000:3B:00.0, {mode}, 7.0"
        lines = "\n".join(processes)
        (tmp_path / "nvidia-smi").write_text(f"""#!/bin/sh
case $1 in
  --query-compute-apps=*) echo '{lines}';;
  --query-gpu=uuid,*) echo 'GPU-a, 16384, {used}, {mode}';;
  --query-gpu=*) echo '{row}';;
  *) exit 2;;
esac
""")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return make


@pytest.fixture
def somebody(tmp_path):
    """A process that could be on a GPU, with a secret among its arguments: its pid."""
    (tmp_path / "train.py").write_text(SLEEPS)
    command = [sys.executable, str(tmp_path / "train.py"), "--token", "hunter2"]
    process = subprocess.Popen(command, env={"ORCH_JOB_DIR": f"{tmp_path}/jobs/mnist-1"})
    yield process.pid
    process.kill()
    process.wait()


def seen_by_probe():
    raw = probe.gather({"workdir": "~/.orch", "peers": [], "torch": False})
    return read_facts("here", raw, raw["clock"]["began"], raw["clock"]["ended"])


def test_a_process_on_a_gpu_is_reported_with_its_owner_its_script_and_its_job(smi, somebody):
    smi(9000, [f"GPU-a, {somebody}, 8192, /usr/bin/python3", "GPU-b, 1, 1, init"], "Exclusive_Process")
    (gpu,) = seen_by_probe().gpus
    python = os.path.basename(sys.executable)
    expected = Occupant(pid=somebody, memory_bytes=8 << 30, user=getpass.getuser(), command=f"{python} train.py")
    assert gpu.occupants == (expected.model_copy(update={"job": "mnist-1"}),)
    assert (gpu.compute_mode, gpu.memory_used_bytes) == ("Exclusive_Process", 9000 << 20)


def test_a_pid_of_another_world_is_no_process_of_ours(smi):
    """nvidia-smi in a container cannot name a process of the machine around it; some process here may have its pid."""
    smi(9000, [f"GPU-a, {os.getpid()}, [N/A], [Not Found]", "GPU-a, none, 1, x", "No running processes found"])
    (gpu,) = seen_by_probe().gpus
    assert gpu.occupants == (Occupant(pid=os.getpid()),)


def test_of_a_process_that_is_gone_its_pid_and_memory_remain():
    gone = subprocess.Popen(["true"])
    gone.wait()
    known = {"pid": gone.pid, "memory_bytes": 12 << 20, "user": None, "command": None, "job": None}
    assert occupants.occupants(f"GPU-a, {gone.pid}, 12, a, b\n") == {"GPU-a": [known]}


@pytest.mark.parametrize(
    ("command_line", "shown"),
    [
        (b"/opt/conda/bin/python\0-u\0train.py\0", "python"),
        (b"/opt/conda/bin/python\0/home/me/train.py\0hf_secret\0", "python train.py"),
        (b"python3\0-m\0mypackage.train\0--token\0x\0", "python3 -m mypackage.train"),
        (b"./solver\0", "solver"),
        (b"", ""),
    ],
)
def test_of_a_command_line_only_what_is_no_secret_is_reported(command_line, shown):
    assert occupants.shown_program(command_line) == shown


class Started:
    """A job of one node with GPU-a, and a controller that keeps the lines it is to show."""

    def __init__(self, job, home):
        (node,) = job.plan.nodes
        self.plan = job.plan.model_copy(update={"nodes": (node.model_copy(update={"gpu_uuids": ("GPU-a",)}),)})
        self.job = job
        known = Node(name="a", host="127.0.0.1", transport="local", python=sys.executable, workdir=node.workdir)
        store = Store(home)
        store.save_cluster(Cluster(name="test", file="test.yaml", nodes=(known,)), current=True)
        self.said = []
        self.controller = Controller(store, Connections(home), self.said.append)

    def launch(self):
        self.controller.launch(self.plan, self.job.blob)


def test_a_job_starts_beside_somebody_and_says_beside_whom(smi, somebody, tmp_path):
    smi(12288, [f"GPU-a, {somebody}, 12288, python3"])
    with gang(tmp_path, SLEEPS, ranks=(1,)) as job:
        started = Started(job, Home(tmp_path / "home"))
        started.launch()
        (line,) = started.said
        whose = f"{getpass.getuser()}'s job mnist-1 (pid {somebody}, 12.0GiB)"
        assert line.startswith(f"a: GPU 0 (Tesla V100-PCIE-16GB) is in use by {whose}: wait until it is free")
        assert job.folder("a").is_dir()


def test_a_job_without_room_beside_somebody_leaves_no_trace(smi, somebody, tmp_path):
    smi(16000, [f"GPU-a, {somebody}, 16000, python3"])
    with gang(tmp_path, SLEEPS, ranks=(1,)) as job:
        started = Started(job, Home(tmp_path / "home"))
        with pytest.raises(HostsError, match=r"384.0MiB of 16.0GiB are free on GPU 0.*needs about 1.0GiB.*--share"):
            started.launch()
        assert not job.folder("a").exists()
        assert started.controller.store.job_ids() == []


def test_a_run_that_waits_starts_when_somebody_has_made_room(smi, somebody, tmp_path):
    smi(16000, [f"GPU-a, {somebody}, 16000, python3"])
    with gang(tmp_path, SLEEPS, ranks=(1,), asked=JobSpec(script="script.py", wait=True)) as job:
        started = Started(job, Home(tmp_path / "home"))
        running = started.controller.launch(started.plan, job.blob)
        words = "a: other programs leave 384 MiB of 16384 on GPU GPU-a, and it needs about 1024"
        wait_for(lambda: running.refresh().waits_for == words, "its place", 60)
        assert running.record.state == "queued"
        smi(0)
        wait_for(lambda: running.refresh().state == "running", "its start", 60)


def test_status_looks_who_is_on_the_gpus_now(smi, somebody, tmp_path, monkeypatch):
    """Beside the cluster's own jobs, which it lists."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    node = Node(name="a", host="127.0.0.1", transport="local", python=sys.executable, workdir=str(tmp_path), gpus=1)
    smi(0)
    cluster = Cluster(schema=1, name="test", file="test.yaml", nodes=(node,), facts={"a": seen_by_probe()})
    Store(Home(tmp_path / "home")).save_cluster(cluster, current=True)
    smi(12288, [f"GPU-a, {somebody}, 12288, python3"])
    shown = CliRunner().invoke(main, ["status", "--json"])
    (shown_node,) = json.loads(shown.stdout)["cluster"]["nodes"]
    assert [(each["gpu"], each["pid"], each["job"]) for each in shown_node["occupants"]] == [(0, somebody, "mnist-1")]
    before = json.loads(CliRunner().invoke(main, ["status", "--json", "--no-look"]).stdout)["cluster"]["nodes"][0]
    assert before["occupants"] == []
    words = CliRunner().invoke(main, ["status"]).stderr
    assert f"a: GPU 0 (Tesla V100-PCIE-16GB) is in use by {getpass.getuser()}'s job mnist-1 (pid {somebody}" in words
