"""The cluster in a Python program, on two hosts that are this machine; and the example of the docs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator import Cluster
from orchestrator.errors import OrchError, StateError, UsageError
from tests.support.local_cluster import INVENTORY
from tests.support.quick_python import quick_python
from tests.support.ssh_rack import ssh_rack
from tests.support.sshd import needs_sshd

ROOT = Path(__file__).resolve().parents[1]
TRAINS = """
import json, os, sys
rank = int(os.environ["RANK"])
print("given", *sys.argv[1:], os.environ.get("LR"), flush=True)
with open(os.environ["ORCH_METRICS"], "a") as file:
    file.write(json.dumps({"event": "start", "schema": 1, "steps": 60, "host": "h", "node": "ab"[rank], "rank": rank,
                           "local_rank": 0, "world_size": 2, "device": "cpu"}) + "\\n")
    for step in range(60):
        told = {"event": "step", "step": step, "samples": 10, "t_ms": 100.0, "wall": 1e9 + step}
        file.write(json.dumps(told) + "\\n")
"""
DIES_ONCE = """
import os, signal, sys, time
if int(os.environ["RANK"]) == 0:
    if not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    print("second")
"""
PRINTS_UNTIL_TOLD = """
import itertools, os, sys, time
for number in itertools.count():
    print("line", number, flush=True)
    time.sleep(0.05)
    if os.path.exists(sys.argv[1]):
        break
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return quick_python(tmp_path_factory.mktemp("quick"))


@pytest.fixture
def here(tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "inventory").mkdir()
    text = INVENTORY.replace("PYTHON", python).replace("FOLDER", str(tmp_path))
    (tmp_path / "inventory" / "rack.yaml").write_text(text)
    (tmp_path / "proj").mkdir()
    (tmp_path / "proj" / "train.py").write_text(TRAINS)
    (tmp_path / "train.py").write_text(TRAINS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_that_would_run_something_here_is_refused_until_its_caller_allows_it(here: Path) -> None:
    with pytest.raises(UsageError, match="would run commands on this machine: a: python") as error:
        Cluster.up("inventory/rack.yaml")
    assert error.value.remedy == "allow_local=True, if you trust it"
    assert not (here / "a").exists()


def test_from_the_file_to_the_summary(here: Path) -> None:
    with Cluster.up("inventory/rack.yaml", allow_local=True) as rack:
        assert (rack.name, rack.nodes, rack.master) == ("rack", ("a", "b"), "a")
        job = rack.run("proj/train.py", "--lr", "0.1", env={"LR": "7"}, name="mine", note="why", nodes=["a", "b"],
                       wait=True)  # fmt: skip
        assert rack.waiting() == []  # hosts without GPUs have no queue
        assert job.id.startswith("mine-") and "b 1: given --lr 0.1 7" in list(job.lines())
        record = job.wait()
        assert (record.state, record.exit_code, record.note) == ("succeeded", 0, "why")
        kept = rack.plan("proj/train.py", keep=["./out/"])
        assert kept.keep == ("out",) and any("nothing is carried over" in note for note in kept.notes)
        summary = job.collect("runs")
        assert summary.samples_per_s == pytest.approx(200.0) and job.run_folder("runs").report.is_file()
    with Cluster() as again:
        assert [one.id for one in again.jobs()] == [again.job("mine").id] == [again.job().id] == [job.id]
        assert again.job().state == "succeeded"


def test_a_job_is_cancelled_and_a_plan_starts_nothing(here: Path) -> None:
    (here / "proj" / "train.py").write_text("import time\ntime.sleep(600)\n")
    with Cluster.up("inventory/rack.yaml", allow_local=True) as rack:
        plan = rack.plan(exp="mnist_lenet", settings={"data": "synthetic", "steps": 5, "sync_bn": False}, nodes="a")
        assert [node.name for node in plan.nodes] == ["a"] and plan.settings["steps"] == 5 and rack.jobs() == []
        assert [node.name for node in rack.plan("proj/train.py", hosts=1, nodes="b,a").nodes] == ["b"]
        assert rack.run("proj/train.py").cancel().state == "cancelled"


def test_a_job_that_its_hosts_failed_is_tried_again_while_somebody_waits_for_it(here: Path) -> None:
    (here / "proj" / "train.py").write_text(DIES_ONCE)
    with Cluster.up("inventory/rack.yaml", allow_local=True) as rack:
        job = rack.run("proj/train.py", str(here / "died"), retries=2, retry_wait_s=0.1)
        failed = job.id
        assert [*job.lines()][-1].endswith("second") and job.id != failed
        record = job.wait()
        assert record.state == "succeeded" and record.attempt and record.attempt.words == "2 of 3"
        assert [one.job for one in record.attempt.earlier] == [failed]
        assert {one.id for one in rack.jobs()} == {failed, job.id}


def test_a_job_whose_plan_is_damaged_hides_no_other(here: Path) -> None:
    with Cluster.up("inventory/rack.yaml", allow_local=True) as rack:
        damaged, other = (rack.run("proj/train.py", name=name, wait=True) for name in ("damaged", "other"))
        (Path(os.environ["ORCH_HOME"]) / "jobs" / damaged.id / "plan.json").write_text("{")
        assert [job.id for job in rack.jobs()] == [other.id]
        with pytest.raises(StateError, match=r"plan\.json is damaged"):
            rack.job("damaged")


@needs_sshd
def test_what_is_asked_between_two_lines_ends_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ssh_rack(tmp_path) as made:
        for name in ("ORCH_HOME", "ORCH_SSH_CONFIG"):
            monkeypatch.setenv(name, made.environment[name])
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.py").write_text(PRINTS_UNTIL_TOLD)
        with Cluster("rack") as rack:
            job = rack.run("train.py", str(tmp_path / "end"), nodes="a2000")
            before, asked = made.servers["a2000"].logins(), 0
            for line in job.lines():
                if asked < 3:
                    assert line.startswith("a2000 0: line") and job.state == "running"
                    asked += 1
                elif line == "a2000 0: line 60":  # three seconds: time enough to dial a broken link again
                    (tmp_path / "end").touch()
            assert made.servers["a2000"].logins() - before == asked  # the stream goes on over the connection of `run`
            assert job.wait().state == "succeeded"


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        ((), {}, "no script, module or experiment given"),
        (("nothing.py",), {}, "nothing.py: no such script"),
        ((), {"exp": "mnist_lenet", "settings": {"epoch": 1}}, "epoch"),
        (("train.py",), {"nodes": "c"}, "c"),
        (("train.py",), {"hosts": "0:2"}, "hosts: '0:2' is not MIN:MAX"),
        (("train.py",), {"hosts": "1:2", "wait_limit_s": 60.0}, "hosts= does without"),
        (("train.py",), {"env": {"RANK": "1"}}, "RANK"),
        (("train.py",), {"rejoin": True}, "rejoin= belongs to retries="),
        (("train.py",), {"retries": -1}, "retries: must be at least 1, not -1"),
        (("train.py",), {"retry_wait_s": 3}, "retry_wait_s= belongs to retries="),
        (("train.py",), {"retries": 1, "retry_wait_s": -1}, "retry_wait_s: must be more than 0, not -1"),
        (("train.py",), {"retries": 1, "retry_wait_s": float("nan")}, "retry_wait_s: must be a finite number"),
        (("train.py",), {"retries": 1, "retry_wait_s": "3"}, "retry_wait_s: '3' is not a time"),
        (("train.py",), {"retries": None, "retry_wait_s": 3}, "retry_wait_s= belongs to retries="),
        (("train.py",), {"wait_limit_s": float("nan")}, "wait_limit_s: must be a finite number"),
        (("train.py",), {"time_limit_s": -1}, "time_limit_s: must be more than 0, not -1"),
        (("train.py",), {"name": "a/b"}, "a/b"),
        (("train.py",), {"args": ["b"]}, "args: not an option here"),
        (("train.py",), {"cluster": "other"}, "cluster: not an option here"),
    ],
)
def test_a_callers_mistake_is_said_in_words(here: Path, words: Any, options: Any, said: str) -> None:
    with Cluster.up("inventory/rack.yaml", allow_local=True) as rack, pytest.raises(OrchError, match=said):
        rack.run(*words, **options)


def test_a_cluster_that_nobody_brought_up_is_named(here: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        Cluster("nowhere")


def test_the_example_of_the_docs_runs(here: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    Cluster.up("inventory/rack.yaml", allow_local=True).close()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "('a', 'b') master a" in done.stdout and "given --lr 0.1" in done.stdout and "succeeded 200" in done.stdout


def test_the_package_alone_imports_none_of_it() -> None:
    code = "import sys, orchestrator; print('orchestrator.api' in sys.modules, 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"
