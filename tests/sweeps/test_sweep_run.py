"""`orch sweep` on two hosts that are this machine: every setting has run once, whoever was killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.local_cluster import Place

SCRIPT = """import json, os, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
with open(place / "ran", "a") as ran:
    ran.write(json.dumps({**options, "on": os.environ["ORCH_NODE"], "job": os.environ["ORCH_JOB"]}) + "\\n")
while not (place / "go").exists() and not (place / f"go{options.get('--n')}").exists():
    time.sleep(0.02)
if options.get("--n") == "13":
    raise SystemExit("unlucky")
if "--steps" in options:
    loss = float(options["--loss"])
    with open(os.environ["ORCH_METRICS"], "a", buffering=1) as metrics:
        for step in range(int(options["--steps"])):
            line = {"event": "step", "step": step, "samples": 1, "t_ms": 10.0, "loss": loss / (1 + step)}
            metrics.write(json.dumps(line) + "\\n")
            time.sleep(0.05)
    time.sleep(120 * (loss == 500))  # until it is stopped
"""
INVENTORY = """
cluster: pair
defaults: {transport: local, device: cpu, python: PYTHON, ranks: 2}
nodes:
  - {name: a, host: localhost, workdir: FOLDER/pa}
  - {name: b, host: localhost, workdir: FOLDER/pb}
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    (place.here / "proj/sleeps.py").write_text(SCRIPT)
    (place.here / "marks").mkdir()
    return place


@pytest.fixture
def marks(place: Place) -> Path:
    return place.here / "marks"


def ran(marks: Path) -> list[dict[str, str]]:
    file = marks / "ran"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def begins(place: Place, *words: str) -> forks.Forked:
    env = {**os.environ, "ORCH_HOME": str(place.folder / "home"), "COLUMNS": "400"}
    return forks.start(forks.ORCH, ["sweep", *words], env=env, cwd=place.here)


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def records(place: Place) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((place.folder / "home/sweeps").glob("*/sweep.json"))]


def test_each_setting_runs_once_on_both_hosts_and_the_table_has_all(place, marks):
    (marks / "go").touch()
    done = place.types("sweep", "--grid", "n=0:6", "--json", "proj/sleeps.py", str(marks))
    found = json.loads(done.stdout)
    assert sorted(each["--n"] for each in ran(marks)) == list("012345")
    assert {each["on"] for each in ran(marks)} == {"a", "b"}
    assert [trial["state"] for trial in found["trials"]] == ["succeeded"] * 6
    assert [trial["job"] for trial in found["trials"]] == [f"{found['sweep']}-{n:03d}" for n in range(1, 7)]
    assert "1/6 n=0: runs on" in done.stderr and done.stderr.count("succeeded, after 0:0") == 6
    jobs = json.loads(place.types("jobs", "--json").stdout)["jobs"]
    assert {job["note"] for job in jobs} == {f"n={n}" for n in range(6)}


def test_a_failed_job_ends_only_itself_and_the_command_says_so(place, marks):
    (marks / "go").touch()
    done = place.types("sweep", "--grid", "n=12,13,14", "proj/sleeps.py", str(marks), code=1)
    assert "error: n=13: " in done.stderr and "try: orch logs --job sweep-sleeps" in done.stderr
    assert sorted(each["--n"] for each in ran(marks)) == ["12", "13", "14"]
    (record,) = records(place)
    assert [trial["state"] for trial in record["trials"]] == ["succeeded", "failed", "succeeded"]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_the_same_command_goes_on_after_its_end_and_runs_nothing_twice(place, marks, signum):
    words = ("--grid", "n=0:5", "proj/sleeps.py", str(marks))
    with begins(place, *words) as first:
        until(lambda: len(ran(marks)) == 2)
        (marks / "go0").touch()
        until(lambda: len(ran(marks)) == 3)
        first.send_signal(signum)
        _, said = first.communicate(60)
        assert first.returncode == (130 if signum == signal.SIGINT else -signum), said
        assert signum == signal.SIGKILL or "Continue: orch sweep --continue sweep-sleeps" in said
    again = ("--continue", "latest") if signum == signal.SIGINT else words
    with begins(place, *again) as second:
        for line in second.stderr:
            if "runs on" in line:  # it has found them, and follows them
                break
        (marks / "go").touch()
        second.communicate(60)
        assert second.returncode == 0
    assert sorted(each["--n"] for each in ran(marks)) == list("01234")
    (record,) = records(place)
    assert all(trial["state"] == "succeeded" and trial["is_collected"] for trial in record["trials"])
    assert not any(trial["lost"] for trial in record["trials"])


def test_it_is_killed_while_it_starts_jobs_and_no_job_is_left_half(place, marks):
    """The mark of a start is there while it is prepared: by then the next command has to undo it."""
    words = ("--grid", "n=0:4", "proj/sleeps.py", str(marks))
    with begins(place, *words) as first:
        until(lambda: [*(place.folder / "home/jobs").glob("*/launching")])
        first.send_signal(signal.SIGKILL)
        first.communicate(60)
    (marks / "go").touch()
    place.types("sweep", *words)
    finished = {trial["job"] for trial in records(place)[0]["trials"]}
    assert sorted(each["--n"] for each in ran(marks) if each["job"] in finished) == list("0123")


def test_only_one_terminal_drives_a_sweep(place, marks):
    words = ("--grid", "n=0:2", "proj/sleeps.py", str(marks))
    with begins(place, *words) as first:
        until(lambda: len(ran(marks)) == 2)
        assert "is under way in another terminal" in place.types("sweep", *words, code=2).stderr
        (marks / "go").touch()
        first.communicate(60)
        assert first.returncode == 0


def test_a_sweep_that_was_left_is_cancelled_with_its_jobs(place, marks):
    words = ("--grid", "n=0:4", "proj/sleeps.py", str(marks))
    with begins(place, *words) as first:
        until(lambda: len(ran(marks)) == 2)
        assert "is under way in another terminal" in place.types("sweep", "--cancel", "latest", code=2).stderr
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(60)
        assert "Cancel: orch sweep --cancel sweep-sleeps" in said
    assert "; 2 jobs ended" in place.types("sweep", "--cancel", "latest").stderr
    assert {job["state"] for job in json.loads(place.types("jobs", "--json").stdout)["jobs"]} == {"cancelled"}
    assert {trial["state"] for trial in records(place)[0]["trials"]} == {"cancelled"} and len(ran(marks)) == 2


def test_several_jobs_share_a_host(place, marks):
    inventory = place.folder / "pair.yaml"
    python = str(place.folder / "quick/bin/python")
    inventory.write_text(INVENTORY.replace("PYTHON", python).replace("FOLDER", str(place.folder)))
    place.types("up", str(inventory), "--allow-local")
    with begins(place, "--grid", "n=0:5", "--gpus", "1", "proj/sleeps.py", str(marks)) as run:
        until(lambda: len(ran(marks)) == 4)
        assert sorted(each["on"] for each in ran(marks)) == ["a", "a", "b", "b"]
        (marks / "go").touch()
        run.communicate(60)
        assert run.returncode == 0
    assert len(ran(marks)) == 5


def test_bad_runs_are_stopped_by_the_median_rule(place, marks):
    (marks / "go").touch()
    words = ("--grid", "loss=1,2,3,4,500", "--stop", "median", "--json", "--", "proj/sleeps.py", str(marks))
    found = json.loads(place.types("sweep", *words, "--steps", "60").stdout)
    states = {trial["values"]["loss"]: trial["state"] for trial in found["trials"]}
    assert states == {**dict.fromkeys("1234", "succeeded"), "500": "stopped"}
    (stopped,) = [trial for trial in found["trials"] if trial["state"] == "stopped"]
    assert stopped["step"] < 60 and stopped["why"] == "worse than the median of the others"


def test_a_dry_run_shows_the_packing_and_starts_nothing(place, marks):
    done = place.types("sweep", "--grid", "n=1,2,3", "--length", "n", "--dry-run", "proj/sleeps.py", str(marks))
    assert "3 jobs on 2 slots" in done.stdout and not ran(marks) and not records(place)


def test_a_published_study_is_named_with_its_new_command(place):
    refused = place.types("sweep", "bottlenecks", "--set", "lr=1", code=2)
    assert "bottlenecks is a published study" in refused.stderr
    assert "orch study bottlenecks" in refused.stderr
