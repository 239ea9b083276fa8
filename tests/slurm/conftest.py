"""A Slurm cluster for all tests of a file, and a home that reaches its login host only."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.slurm_lab import SlurmLab, slurm_lab

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 150.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Hosts of a lab share the cores of one machine."""


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    with slurm_lab() as standing:
        yield standing


@dataclass(frozen=True)
class Person:
    """At home: only the login host is reached from here. types: as in an inventory."""

    lab: SlurmLab
    folder: Path

    def up(self, *types: dict[str, Any], **engine: Any) -> str:
        inventory = {
            "cluster": "hpc",
            "engine": {"slurm": {"login": self.lab.login, "workdir": f"{self.lab.work}/{self.folder.name}", **engine}},
            "defaults": {
                **self.lab.keys,
                "interface": "eth0",
                "bandwidth": "2.5Gbps",
                "device": "cpu",
                "env": ONE_THREAD,
            },
            "nodes": list(types),
        }
        (self.folder / "hpc.yaml").write_text(yaml.safe_dump(inventory))
        return self("up", "hpc.yaml")

    def up_by_ssh(self, *types: dict[str, Any]) -> str:
        """The same hosts, as they are without Slurm."""
        place = {"user": self.lab.user, "interface": "eth0", "bandwidth": "2.5Gbps", "device": "cpu"}
        nodes = [
            {
                **{key: value for key, value in each.items() if key != "slurm"},
                "host": self.lab.ssh_address(each["name"]),
                "workdir": f"{self.lab.work}/{self.folder.name}/{each['name']}",
            }
            for each in types
        ]
        inventory = {"cluster": "ssh", "defaults": {**self.lab.keys, **place}, "nodes": nodes}
        (self.folder / "ssh.yaml").write_text(yaml.safe_dump(inventory))
        return self("up", "ssh.yaml")

    def __call__(self, *words: str, code: int | None = 0, **variables: str) -> str:
        """Both outputs of `orch`, after an end with this exit code; None: with any."""
        done = subprocess.run(
            self.line(*words),
            cwd=self.folder,
            env=self.environment(variables),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert code is None or done.returncode == code, f"{done.stdout}\n{done.stderr}\n{self.batch_logs()}"
        return done.stdout + done.stderr

    def begun(self, *words: str) -> subprocess.Popen[str]:
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            self.line(*words), cwd=self.folder, env=self.environment({}), stdout=pipe, stderr=both, text=True
        )

    def line(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "orchestrator.cli", *words]

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        own = {"ORCH_HOME": str(self.folder / "home"), "ORCH_SSH_CONFIG": "/dev/null", "COLUMNS": "200"}
        return {**os.environ, **own, "PYTHONPATH": str(ROOT), **more}

    def jobs(self) -> list[dict[str, Any]]:
        document, _ = json.JSONDecoder().raw_decode(self("jobs", "--json"))  # then what is on standard error
        return list(document["jobs"])

    def state(self) -> str:
        return str(self.jobs()[0]["state"])

    def until(self, holds: Callable[[], bool], within_s: float = LONG_S, pause_s: float = 0.5) -> None:
        end_s = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < end_s, f"{self('jobs')}\n{self.batch_logs()}"
            time.sleep(pause_s)

    def printed(self, text: str) -> bool:
        """Whether a rank of any job has printed it."""
        work = self.lab.work / self.folder.name / "nodes"
        return any(text in path.read_text(errors="replace") for path in work.glob("*/jobs/*/rank-*/stdout.log"))

    def batch_logs(self) -> str:
        logs = sorted(self.lab.work.glob("*/submitted/*/slurm.log"))
        return "\n".join(f"{log.parent.name}:\n{log.read_text()[-2000:]}" for log in logs[-2:])

    def slurm_job(self) -> str:
        """The number of the newest one."""
        return self.lab.exec("squeue", "-h", "-o", "%A").split()[0]

    def slurm_state(self, job: str) -> str:
        said = self.lab.exec("scontrol", "show", "job", "-o", job)
        return said.partition("JobState=")[2].split()[0]


@pytest.fixture
def person(lab: SlurmLab, tmp_path: Path) -> Iterator[Person]:
    someone = Person(lab, tmp_path)
    yield someone
    lab.exec("scancel", f"--user={lab.user}")
    someone.until(lambda: not lab.exec("squeue", "-h").strip(), 60)


V100 = {"name": "v100", "gpu": "Tesla V100-16GB", "gpus": 1, "ranks": 1, "slurm": {"gres": "gpu:v100:1"}}
A2000 = {"name": "a2000", "gpu": "RTX A2000", "gpus": 1, "ranks": 1, "slurm": {"gres": "gpu:a2000:1"}}
A16 = {"name": "a16", "gpu": "A16", "gpus": 2, "ranks": 2, "slurm": {"gres": "gpu:a16:2", "partition": "urgent"}}
