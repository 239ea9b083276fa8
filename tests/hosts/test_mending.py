"""What `orch doctor --fix` finds to mend on a host: what was cut short and is ours, and nothing else."""

from __future__ import annotations

import os

import pytest

from orchestrator.hosts import Who, work_folders
from orchestrator.record import Owner
from orchestrator.remote import belongings as mending
from orchestrator.remote import layout, processes
from orchestrator.remote.claim import claimed
from tests.hosts.test_ownership import here

ADA, BOB = (Owner(id=letter * 32, name=f"{name}@desk") for letter, name in (("a", "ada"), ("b", "bob")))
UNDONE, ENDED = {"state": "undone", "pid": 1}, {"state": "succeeded", "pid": 1}
RUNS = {"state": "running", **processes.identify(os.getpid())._asdict()}
JOBS = {
    "undone": (ADA, "test", UNDONE), "half": (ADA, "test", None), "bobs": (BOB, "test", UNDONE),
    "elsewhere": (ADA, "other", UNDONE), "ended": (ADA, "test", ENDED), "runs": (ADA, "test", RUNS),
    "died": (ADA, "test", {"state": "running", "pid": 1}), "wrote": (ADA, "test", None),
}  # fmt: skip
HALVES = {"jobs/.orch-gone-1", "venv/.orch-gone-2", f"code/.{'c' * 64}.17"}
KEPT = {f"code/{'c' * 64}", "jobs/.notes", "code/notes", "venv/torch-2.9.0"}


@pytest.fixture
def work(tmp_path, monkeypatch):
    made = layout.WorkFolder(str(tmp_path / "work"))
    with claimed(made):
        pass
    for name, (owner, cluster, agent) in JOBS.items():
        job = made.job(name)
        job.root.mkdir(parents=True)
        layout.write_json(job.node, {"job": name, "cluster": cluster, "owner": owner.model_dump()})
        if agent:
            layout.write_json(job.agent, {"job": name, **agent})
    (made.job("wrote").root / "rank-0").mkdir()
    for name in (*HALVES, *KEPT):
        (made.root / name).mkdir(parents=True)
    monkeypatch.setattr(mending, "OLD_S", -1.0)
    return made


def mended(work, *, end):
    return mending.mend({"workdir": str(work.root), **Who(ADA, "test").request, "end": end})


def test_halves_and_starts_of_ours_that_never_began_are_listed_and_then_removed(work):
    expected = {*HALVES, "jobs/undone", "jobs/half"}
    listed = mended(work, end=False)
    assert {*listed["folders"]} == expected and listed["why"] == []
    assert all((work.root / name).is_dir() for name in expected)
    assert {*mended(work, end=True)["folders"]} == expected
    assert not any((work.root / name).exists() for name in expected)
    kept = {f"jobs/{name}" for name in JOBS} - expected | KEPT
    assert all((work.root / name).is_dir() for name in kept)


def test_what_is_young_may_be_at_work_and_stays(work):
    found = work_folders.mend(here(work.root), Who(ADA, "test"), end=True)
    assert (found.folders, found.why) == ((), ())
    assert (work.root / "jobs/undone").is_dir()


def test_while_others_are_at_work_there_nothing_is_removed(work, monkeypatch):
    monkeypatch.setattr(mending, "ALONE_S", 0.0)
    with claimed(work):
        found = mended(work, end=True)
    assert found["folders"] == [] and "is at work there" in found["why"][0]
    assert (work.root / "jobs/undone").is_dir()


def test_a_folder_that_is_not_ours_is_not_looked_into(tmp_path):
    (tmp_path / "jobs" / ".orch-gone-1").mkdir(parents=True)
    found = work_folders.mend(here(tmp_path), Who(ADA, "test"), end=True)
    assert (found.reaped.found, found.folders, found.why) == ((), (), ())
    assert (tmp_path / "jobs" / ".orch-gone-1").is_dir()
