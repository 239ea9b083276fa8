"""`orch run --notify`: a command of one's own when the job has ended, over the local transport."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from orchestrator.cli.run import notify
from orchestrator.jobs import JobRecord
from tests.support.local_cluster import Place
from tests.support.sshd import wait_for

SHOW = 'echo "$ORCH_JOB|$ORCH_STATE|$ORCH_EXIT_CODE|$ORCH_RUN|$GIVEN" > told; echo printed'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("person"))
    (place.here / "proj/fails.py").write_text("raise SystemExit(7)\n")
    return place


@pytest.mark.parametrize(("script", "state", "code"), [("train.py", "succeeded", 0), ("fails.py", "failed", 7)])
def test_it_is_told_how_the_job_ended_and_no_variable_of_its_ranks(
    script: str, state: str, code: int, place: Place
) -> None:
    words = ("--json", "--nodes", "b", "--env", "GIVEN=x", "--notify", SHOW, f"proj/{script}")
    done = place.types("run", *words, code=1 if code else 0)
    job = json.loads(done.stdout)["id"]
    assert "printed" in done.stderr
    assert (place.here / "told").read_text() == f"{job}|{state}|{code}|{place.here / 'runs' / job}|\n"


def test_its_failure_is_a_warning(place: Place) -> None:
    done = place.types("run", "--nodes", "b", "--notify", "exit 3", "proj/train.py")
    assert "--notify: the command ended with exit code 3; the job itself is succeeded" in done.stderr


def test_who_detaches_is_told_by_the_master(place: Place) -> None:
    line = f'echo "$ORCH_JOB|$ORCH_STATE|$ORCH_EXIT_CODE|$GIVEN" > {place.here}/there'
    words = ("--detach", "--nodes", "b", "--env", "GIVEN=x", "--notify", line, "proj/fails.py")
    job = place.types("run", *words).stdout.strip()
    wait_for((place.here / "there").exists, "the notification", 120)
    wait_for(lambda: (place.here / "there").read_text(), "its words", 10)
    assert (place.here / "there").read_text() == f"{job}|failed|7|\n"
    plans = [path.read_text() for path in place.folder.rglob(f"{job}/plan.json")]
    assert len(plans) == 2 and not any("ORCH_EXIT_CODE" in plan for plan in plans)  # here, and on its host


def test_one_that_never_ends_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = JobRecord(schema=1, id="j", state="succeeded", exp="x", cluster="c", nodes=("a",))
    before = time.monotonic()
    notify("sleep 1000 & sleep 1000", record, 0.2)
    assert time.monotonic() - before < 100
    assert "took longer than 0.2 s and was ended" in capfd.readouterr().err


def test_a_webhook_in_a_line_is_in_no_list_of_processes(tmp_path: Path) -> None:
    """Its address may be a secret; of the shell itself only the argument list is public."""
    record = JobRecord(schema=1, id="j", state="succeeded", exp="x", cluster="c", nodes=("a",))
    notify(f"secret=3; cat /proc/$$/cmdline > {tmp_path}/argv; env > {tmp_path}/env", record)
    assert "secret=3" not in (tmp_path / "argv").read_text()
    assert "secret=3" not in (tmp_path / "env").read_text()


def test_a_webhook_of_the_environment_refuses_no_line_that_it_cannot_serve(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCH_NOTIFY", "https://127.0.0.1:1/secret")
    said = place.types("run", "--nodes", "b", "--retries", "1", "proj/train.py").stderr
    assert "ORCH_NOTIFY is not used, since a webhook reports each attempt's end; with --detach it reports" in said
    assert "secret" not in said
