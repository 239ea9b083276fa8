"""`orch run --name` and `--note`: what a person calls a job, wherever the job is shown."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest

from orchestrator.planning import job_id, job_name, job_note
from tests.support.local_cluster import Place

NOTE = "rate of the paper <b>, α=0.1"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("person"))


def test_a_job_is_shown_with_its_name_and_note_and_repeated_with_them(place: Place) -> None:
    asked = ("--name", "Wide_net-2", "--note", NOTE, "--nodes", "b")
    job = place.types("run", "--detach", *asked, "proj/train.py").stdout.strip()
    assert job.startswith("Wide_net-2-20")
    place.types("logs", "-f", "--job", "Wide_net-2")
    (row,) = json.loads(place.types("jobs", "--json").stdout)["jobs"]
    assert (row["id"], row["name"], row["note"]) == (job, "Wide_net-2", NOTE)
    assert NOTE in place.types("jobs").stdout
    assert f" --name Wide_net-2 --note '{NOTE}' -- /" in place.types("collect").stdout
    run = place.here / "runs" / job
    assert "rate of the paper &lt;b&gt;, α=0.1" in (run / "report.html").read_text()
    assert json.loads((run / "summary.json").read_text())["note"] == NOTE
    again = place.plan(str(run / "job.yaml"))
    assert (again["name"], again["note"]) == ("Wide_net-2", NOTE)


def test_a_job_found_on_its_hosts_alone_has_them_too(place: Place) -> None:
    words = ("--name", "found", "--note", "kept by hosts", "--nodes", "b")
    job = place.types("run", "--detach", *words, "proj/train.py").stdout.strip()
    place.types("logs", "-f", "--job", job)
    (place.folder / "home" / "jobs" / job / "job.json").write_text("{")
    rows = json.loads(place.types("jobs", "--rescan", "--json").stdout)["jobs"]
    (row,) = [row for row in rows if row["id"] == job]
    assert (row["name"], row["note"], row["state"]) == ("found", "kept by hosts", "succeeded")


@pytest.mark.parametrize("name", ["", "-a", "a-", "a.b", "a b", "a/b", "ä", "latest", "a" * 41, "a\n"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a job name"):
        job_name(name)


@pytest.mark.parametrize("note", ["", "  ", "a\nb", "a\x1b[2J", "a" * 201])
def test_what_is_no_note_is_refused(note: str) -> None:
    with pytest.raises(ValueError, match="is not a note: one printable line"):
        job_note(note)


def test_the_command_line_and_a_job_file_refuse_them_alike(place: Place) -> None:
    said = "is not a job name: letters, digits, `_` and `-`"
    assert said in place.types("run", "--name", "a b", "proj/train.py", code=2).stderr
    (place.here / "bad.yaml").write_text("script: proj/train.py\nname: a b\n")
    refused = place.types("run", "bad.yaml", code=2).stderr
    assert "bad.yaml:2: name: 'a b'" in refused and said in refused


def test_an_id_keeps_a_name_as_it_is() -> None:
    now = datetime(2026, 11, 21, 9, 12, tzinfo=timezone.utc)
    assert job_id("a" * 40, now).startswith(f"{'a' * 40}-20261121-0912-")
    assert job_id("A_b-1", now)[:-3] == "A_b-1-20261121-0912-"
    assert job_id("my train.py", now)[:-3] == "my-train-20261121-0912-"
