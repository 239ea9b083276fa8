"""`orch top`: two running jobs at once, on a pipe, as JSON and on a terminal; leaving it leaves them alone."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_cluster import Place
from tests.support.sshd import wait_for

TRAINS = """
import json, os, pathlib, time
rank, end = int(os.environ["RANK"]), pathlib.Path(os.environ["END"])
def say(**fields):
    with open(os.environ["ORCH_METRICS"], "a") as file:
        file.write(json.dumps(fields) + "\\n")
say(event="start", schema=1, steps=100000)
step = 0
while not end.exists():
    time.sleep(0.05)
    waits = 40.0 * rank
    say(event="step", step=step, samples=10, t_ms=100.0, exposed_ms=waits, comm_ms=waits, loss=3.0, wall=time.time())
    step += 1
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("top"))
    (made.here / "trains.py").write_text(TRAINS)
    return made


@pytest.fixture(scope="module")
def jobs(place: Place) -> Any:
    end = place.folder / "end"
    words = ("run", "--detach", "--json", "--env", f"END={end}", "--", "trains.py")
    started = [json.loads(place.types(*words).stdout)["id"] for _ in range(2)]
    yield started
    end.touch()
    wait_for(lambda: states(place) == {"succeeded"}, "the jobs' end", 60)


def states(place: Place) -> set[str]:
    return {job["state"] for job in json.loads(place.types("jobs", "--json").stdout)["jobs"]}


def looks(place: Place, *words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in place.types("top", "--once", "--json", *words).stdout.splitlines()]


def test_all_jobs_that_run_are_there_each_with_all_its_hosts_and_the_slow_one_named(place: Place, jobs: Any) -> None:
    wait_for(lambda: all(host["step"] for look in looks(place) for host in look["hosts"]), "steps of all hosts", 60)
    found = {look["job"]: look for look in looks(place, "--every", "10s")}
    assert set(found) == set(jobs)
    for look in found.values():
        assert [host["node"] for host in look["hosts"]] == ["a", "b"] and look["steps"] == 100000
        assert (look["state"], look["samples_per_s"], look["loss"], look["slowest"]) == ("running", 200.0, 0.3, "a")
    assert [look["job"] for look in looks(place, jobs[0])] == [jobs[0]]


def test_a_job_whose_plan_is_damaged_is_named_and_hides_no_other(place: Place, jobs: Any) -> None:
    plan = place.folder / "home" / "jobs" / jobs[0] / "plan.json"
    kept = plan.read_bytes()
    try:
        plan.write_text("{")
        done = place.types("top", "--once", "--json")
    finally:
        plan.write_bytes(kept)
    assert [json.loads(line)["job"] for line in done.stdout.splitlines()] == [jobs[1]]
    assert f"{jobs[0]}/plan.json is damaged" in done.stderr


def test_on_a_pipe_it_says_a_line_a_job(place: Place, jobs: Any) -> None:
    lines = place.types("top", "--once", "--every", "10s").stdout.splitlines()
    assert len(lines) == 2 and all("200 samples/s" in line and "a is the slowest" in line for line in lines)


def test_on_a_terminal_it_draws_them_and_a_ctrl_c_leaves_them_running(place: Place, jobs: Any) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "ORCH_HOME": str(place.folder / "home"), "COLUMNS": "100", "TERM": "xterm"}
    words = [sys.executable, "-m", "orchestrator.cli", "top", "--every", "0.2s"]
    root = Path(__file__).resolve().parents[2]
    running = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=root, start_new_session=True
    )
    os.close(theirs)
    drawn = read_until(ours, lambda text: text.count("samples/s so far") > 4)
    running.send_signal(signal.SIGINT)
    assert all(job in drawn for job in jobs) and "a is the slowest: others wait for it up to 40 %" in drawn
    assert "Traceback" not in read_until(ours, lambda text: running.poll() is not None)
    assert running.wait() == 0
    assert states(place) == {"running"}


def read_until(handle: int, is_enough: Any) -> str:
    text = ""
    while not is_enough(text):
        if select.select([handle], [], [], 0.1)[0]:
            try:
                text += os.read(handle, 1 << 16).decode(errors="replace")
            except OSError:  # all have closed it
                break
    return text


def test_where_nothing_runs_it_says_so(tmp_path: Path) -> None:
    env = {**os.environ, "ORCH_HOME": str(tmp_path)}
    words = [sys.executable, "-m", "orchestrator.cli", "top"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no job is running\n  try: `orch jobs` lists jobs that have ended\n"
