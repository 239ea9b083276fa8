"""`orch run --hosts MIN:MAX` over real SSH servers: it starts on what is healthy, and names every other host."""

from __future__ import annotations

import contextlib
import html
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.ssh_rack import Rack, ssh_rack
from tests.support.sshd import needs_sshd

pytestmark = needs_sshd


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """Of `a2000` and `v100`, the second the better master by nothing; `gone` was off at `orch up`."""
    with ssh_rack(tmp_path_factory.mktemp("rack")) as made:
        (made.folder / "code").mkdir()
        (made.folder / "code/train.py").write_text("import os\nprint('of', os.environ['WORLD_SIZE'])\n")
        yield made


def folder(rack: Rack, node: str) -> Path:
    return rack.folder / {"a2000": "one", "v100": "two"}[node]


def jobs(rack: Rack) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(rack.types("jobs", "--json").stdout)["jobs"]
    return found


def runs(rack: Rack, *words: str) -> tuple[dict[str, Any], str]:
    """The job's record, and what was said of it."""
    done = rack.types("run", "--json", *words, "code/train.py")
    record: dict[str, Any] = json.loads(done.stdout)
    assert record["state"] == "succeeded"
    return record, done.stderr


@contextmanager
def refusing(rack: Rack, node: str) -> Iterator[None]:
    """A host that can be reached, and refuses each job: others could change its code."""
    folder(rack, node).mkdir(exist_ok=True)
    folder(rack, node).chmod(0o777)
    try:
        yield
    finally:
        folder(rack, node).chmod(0o700)


@contextmanager
def stopped(rack: Rack, node: str) -> Iterator[None]:
    rack.servers[node].stop()
    try:
        yield
    finally:
        rack.servers[node].start()


def left_out(record: dict[str, Any]) -> dict[str, str]:
    return {each["node"]: each["reason"] for each in record["hosts"]["left_out"]}


def test_without_it_a_host_that_is_off_is_refused_and_the_option_is_among_the_remedies(rack: Rack) -> None:
    said = rack.types("run", "--dry-run", "code/train.py", exit_code=3).stderr
    assert "leave it out: `--nodes`, `orch node release gone`, `--hosts MIN:MAX`" in said


def test_a_host_that_was_off_is_left_out_and_named(rack: Rack) -> None:
    record, said = runs(rack, "--hosts", "2:3")
    assert sorted(record["nodes"]) == ["a2000", "v100"]
    reason = left_out(record)["gone"]
    assert "(at the last `orch up`)" in reason and f"note: left out: gone: {reason}" in said
    assert record["hosts"]["spares"] == []


def test_the_dry_run_says_the_same_and_the_job_is_repeated_with_it(rack: Rack) -> None:
    plan = json.loads(rack.types("run", "--dry-run", "--json", "--hosts", "1:3", "code/train.py").stdout)
    assert (plan["world_size"], sorted(left_out(plan))) == (2, ["gone"])
    assert plan["hosts"]["candidates"] == ["a2000", "v100", "gone"]
    assert any(note.startswith("left out: gone: ") for note in plan["notes"])
    shown = rack.types("run", "--dry-run", "--hosts", "1:3", "code/train.py")
    assert "hosts 1 to 3 of a2000, v100, gone" in shown.stdout and "left out: gone: " in shown.stderr
    record, _ = runs(rack, "--hosts", "1:3")
    shown = rack.types("collect", "--job", record["id"])
    assert "--nodes a2000,v100,gone --hosts 1:3" in shown.stdout
    reason = f"Left out, by --hosts 1:3: gone ({left_out(record)['gone']})."
    assert f"note: {reason}" in shown.stderr
    report = (rack.folder / f"runs/{record['id']}/report.html").read_text()
    assert html.unescape(report).count(reason) == 1
    again = f"runs/{record['id']}/job.yaml"
    assert json.loads(rack.types("run", "--dry-run", "--json", again).stdout)["hosts"] == record["hosts"]


def test_a_host_that_went_off_since_then_costs_no_start(rack: Rack) -> None:
    with stopped(rack, "v100"):
        record, said = runs(rack, "--hosts", "1:2", "--nodes", "a2000,v100")
        shown = rack.types("run", "--dry-run", "--json", "--hosts", "1", "--nodes", "v100,a2000", "code/train.py")
    assert [node["name"] for node in json.loads(shown.stdout)["nodes"]] == ["a2000"]
    assert record["nodes"] == ["a2000"] and [*left_out(record)] == ["v100"]
    assert "note: left out: v100: nothing listens at 127.0.0.1:" in said


def test_a_host_that_lets_nobody_in_costs_the_time_for_connecting_and_no_more(rack: Rack) -> None:
    rack.servers["v100"].freeze()  # it takes the connection, and says nothing
    try:
        record, _ = runs(rack, "--hosts", "1:2", "--nodes", "a2000,v100")
    finally:
        rack.servers["v100"].stop()
        rack.servers["v100"].start()
    assert record["nodes"] == ["a2000"] and "within 10 s" in left_out(record)["v100"]


def test_with_fewer_than_the_least_nothing_is_started(rack: Rack) -> None:
    before = len(jobs(rack))
    with stopped(rack, "v100"):
        said = rack.types("run", "--hosts", "2:3", "code/train.py", exit_code=3).stderr
    assert "error: --hosts 2:3: 1 of 3 hosts can take part, and 2 are needed; nothing was started" in said
    assert "error: v100: nothing listens at " in said and "error: gone: nothing listens at " in said
    assert "--hosts 1:3" in said
    assert len(jobs(rack)) == before


def test_a_host_that_refuses_is_left_out_and_keeps_nothing(rack: Rack) -> None:
    known = {job["id"] for job in jobs(rack)}
    there = {*(folder(rack, "a2000") / "jobs").iterdir()}
    with refusing(rack, "a2000"):
        record, said = runs(rack, "--hosts", "1:2", "--nodes", "a2000,v100")
    assert record["nodes"] == ["v100"] and "may be written by" in left_out(record)["a2000"]
    assert said.count("note: left out: a2000: ") == 1
    assert {job["id"] for job in jobs(rack)} - known == {record["id"]}  # the start that was undone is no job
    assert {*(folder(rack, "a2000") / "jobs").iterdir()} == there
    with refusing(rack, "a2000"):
        said = rack.types("run", "--hosts", "2", "--nodes", "a2000,v100", "code/train.py", exit_code=3).stderr
    assert "1 of 2 hosts can take part, and 2 are needed" in said and "error: a2000: " in said


def test_on_a_terminal_each_attempt_is_named(rack: Rack) -> None:
    ours, theirs = pty.openpty()
    words = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "run",
        "--detach",
        "--hosts",
        "1:2",
        "--nodes",
        "a2000,v100",
        "code/train.py",
    ]
    environment = {**rack.environment, "TERM": "xterm", "COLUMNS": "200"}
    with refusing(rack, "a2000"):
        process = subprocess.Popen(words, stdout=theirs, stderr=theirs, cwd=rack.folder, env=environment)
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # which is how a terminal ends
            while piece := os.read(ours, 1 << 16):
                said += piece
        os.close(ours)
        assert process.wait() == 0
    attempts = dict.fromkeys(re.findall(rb"starting train-\S+ on \d hosts?", said))
    assert [attempt.split()[-2] for attempt in attempts] == [b"2", b"1"]


def test_of_more_than_the_most_the_best_are_taken_and_a_spare_takes_the_place_of_one_that_refuses(rack: Rack) -> None:
    record, said = runs(rack, "--hosts", "1", "--nodes", "v100,a2000")
    assert record["nodes"] == ["v100"] and record["hosts"]["spares"] == ["a2000"]
    assert "note: spare: a2000; the job takes 1 host at most, the first in order" in said
    with refusing(rack, "v100"):
        record, said = runs(rack, "--hosts", "1", "--nodes", "v100,a2000")
    assert record["nodes"] == ["a2000"] and [*left_out(record)] == ["v100"] and record["hosts"]["spares"] == []
    rack.types("master", "a2000")
    record, _ = runs(rack, "--hosts", "1", "--nodes", "v100,a2000")
    assert record["nodes"] == ["a2000"]  # a pinned master goes first
    rack.types("master", "--elect")


def test_a_released_host_may_be_named_and_is_left_out(rack: Rack) -> None:
    rack.types("node", "release", "a2000")
    plan = json.loads(
        rack.types("run", "--dry-run", "--json", "--hosts", "1:2", "--nodes", "a2000,v100", "code/train.py").stdout
    )
    assert left_out(plan) == {"a2000": "is released"}
    rack.types("node", "restore", "a2000")


@pytest.mark.parametrize("text", ["0:2", "3:2", "a:b", ""])
def test_what_is_no_range_is_one_message(rack: Rack, text: str) -> None:
    said = rack.types("run", "--hosts", text, "code/train.py", exit_code=2).stderr
    assert said.startswith(f"error: --hosts: {text!r} is not MIN:MAX or N") and said.count("error:") == 1


def test_more_hosts_than_there_are_is_a_mistake_and_no_host_is_asked(rack: Rack) -> None:
    logins = rack.servers["a2000"].logins()
    said = rack.types("run", "--hosts", "4:5", "code/train.py", exit_code=2).stderr
    assert "--hosts 4:5: 3 hosts to choose from, and 4 are needed" in said
    assert rack.servers["a2000"].logins() == logins


def test_settings_that_name_a_host_that_is_left_out_are_refused_with_its_reason(rack: Rack) -> None:
    words = ["--exp", "mnist_lenet", "--set", "batch=24"]
    with stopped(rack, "v100"):
        asked = ["--hosts", "1:2", "--nodes", "a2000,v100", *words, "--set", "shares=a2000=8,v100=16"]
        said = rack.types("run", *asked, exit_code=2).stderr
    assert "error: shares: v100 takes no part" in said and "error: left out: v100: nothing listens at " in said
    asked = ["--dry-run", "--hosts", "1", "--nodes", "a2000,v100", *words, "--set", "shares=v100=16"]
    said = rack.types("run", *asked, exit_code=2).stderr
    assert "error: shares: v100 takes no part" in said and "error: spare: v100; the job takes 1 host at most" in said
