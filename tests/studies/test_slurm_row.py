"""The row of Slurm in `ways_to_start`, on a node of a real Slurm."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = "--set batch=4 --set warmup_steps=1 --repeats 1"


class OnANode:
    """A person who types orch on one of Slurm's nodes."""

    def __init__(self, lab: Any, program: Path) -> None:
        self.lab, self.program = lab, program
        rack = f"cluster: n\ndefaults: {{transport: local, device: cpu, ranks: 2, python: {lab.python}}}\n"
        rack += f"nodes:\n  - {{name: a16, host: 127.0.0.1, workdir: {lab.work}/w}}\n"
        (lab.work / "rack.yaml").write_text(rack)
        (lab.work / "rack.yaml").chmod(0o644)
        assert "a16" in self.types("up rack.yaml --allow-local")

    def command(self, line: str) -> list[str]:
        user, work = self.lab.user, self.lab.work
        here = f"cd {work}; export HOME={work} ORCH_HOME={work}/home PYTHONPATH={ROOT} OMP_NUM_THREADS=1 COLUMNS=200"
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        line = f"{here}; exec {self.lab.python} -m orchestrator.cli {line}"
        return [str(self.program), "on", "a16", *as_user, "bash", "-c", line]

    def types(self, line: str) -> str:
        pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 280}
        done = subprocess.run(self.command(line), env=self.lab.environment, **pipes)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def tasks(self) -> list[str]:
        lines = self.lab.on("a16", "ps", "-e", "-o", "args=").splitlines()
        return [line for line in lines if "-m trainer" in line or "orch_remote" in line]


@pytest.fixture(scope="module")
def person() -> Iterator[OnANode]:
    support = pytest.importorskip("tests.support.slurm_lab")
    with support.slurm_lab(NODES="a16:a16:2:2:2500mbit") as lab:
        yield OnANode(lab, support.PROGRAM)


def wait_until(condition: Callable[[], bool], limit_s: float = 120) -> None:
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.2)


def test_srun_starts_the_ranks_next_to_torchruns_row(person: OnANode) -> None:
    table = person.types(f"study ways_to_start --rows torchrun,slurm --set steps=2 {SETTINGS}")
    measured = dict(re.findall(r"^(torchrun|Slurm) +([0-9.]+) ", table, re.MULTILINE))
    assert measured.keys() == {"torchrun", "Slurm"}, table
    assert person.tasks() == [] and person.lab.exec("squeue", "--noheader") == ""


def test_tasks_end_with_their_job_even_if_orch_is_killed_on_the_host(person: OnANode) -> None:
    line = f"study ways_to_start --rows slurm --again --set steps=500 {SETTINGS}"
    study = subprocess.Popen(person.command(line), env=person.lab.environment, stderr=subprocess.PIPE)
    try:
        metrics = f"{person.lab.work}/w/jobs/*/rank-1/metrics.jsonl"
        wait_until(lambda: "500" in person.lab.on("a16", "sh", "-c", f"grep -hs '\"start\"' {metrics} || true"))
        assert len([line for line in person.tasks() if "-m trainer" in line and "srun" not in line]) == 2
        person.lab.on("a16", "sh", "-c", "kill -KILL $(pgrep -f '[o]rch_remote.keeper')")
        wait_until(lambda: not person.tasks() and person.lab.exec("squeue", "--noheader") == "")
    finally:
        study.terminate()
        study.communicate(timeout=60)
