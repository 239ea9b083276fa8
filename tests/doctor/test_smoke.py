"""The all-reduce of `orch doctor --collective`, as real jobs on this machine whose hosts fail or hang before torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.controller import opened
from orchestrator.measuring import smoke
from orchestrator.paths import Home
from tests.support.local_cluster import Place


@pytest.fixture
def person(tmp_path: Path) -> Place:
    return Place(tmp_path)


def tried(person: Place, prepare: str, monkeypatch: pytest.MonkeyPatch, limit_s: float = 60.0):
    """On two hosts of which the second runs this before its ranks."""
    monkeypatch.setattr(smoke, "LIMIT_S", limit_s)
    file = person.folder / "rack.yaml"
    text = file.read_text()
    second = text.rindex("workdir:")
    file.write_text(f"{text[:second]}prepare: {prepare!r}, {text[second:]}")
    person.types("up", str(file), "--allow-local")
    with opened(Home(person.folder / "home")) as controller:
        known = controller.store.cluster("rack")
        return smoke.smoke(controller, known, ["a", "b"], ("gloo",)), controller.jobs.all("rack").records


def test_the_host_that_fails_is_in_the_words_and_its_job_is_named(person, monkeypatch):
    found, jobs = tried(person, "echo the disk is gone >&2; exit 3", monkeypatch)
    assert (found.backend, found.guilty) == ("gloo", ())  # of two nobody can tell by trying
    assert found.failure.startswith("b: ")
    assert [found.job] == [job.id for job in jobs]
    assert found.job.startswith("doctor-")


def test_what_hangs_is_ended_after_its_limit(person, monkeypatch):
    found, (job,) = tried(person, "sleep 600", monkeypatch, limit_s=4.0)
    assert found.failure == "it had not ended after 4 s"
    assert job.state == "cancelled"


def test_a_job_that_cannot_be_planned_says_why_and_is_no_traceback(person):
    with opened(Home(person.folder / "home")) as controller:
        known = controller.store.cluster("rack")
        gone = known.model_copy(update={"released": ("b",)})
        found = smoke.smoke(controller, gone, ["a", "b"], ("gloo",))
    assert found.failure.startswith("b is released")
    assert found.job is None
