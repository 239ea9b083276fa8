"""Commands on the login host; here it is this machine, with a home of its own."""

import os
from pathlib import Path

import pytest

from orchestrator.errors import ConnectError, HostError
from orchestrator.slurm.login import SlurmLogin
from orchestrator.transport import LocalTransport
from orchestrator.transport.slurm import SlurmTransport

OTHERS = ("venv/bin/python", "locks/mine", "controller-of-lego/main.c", "submitted/thesis.pdf")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with folders of the names that orch uses in its work folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in OTHERS:
        path = tmp_path / "home" / name
        path.parent.mkdir(parents=True)
        path.touch()
    return tmp_path / "home"


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("folder", ["/nowhere/orch", "~/nowhere/orch"])
@pytest.mark.parametrize(
    "act",
    [
        lambda login: login.submit("job", b"", at="../.."),
        lambda login: login.unpack("code", b""),
        lambda login: login.has("venv"),
        lambda login: login.text_of("job", "started"),
        lambda login: login.drop("thesis.pdf"),
        lambda login: login.submissions(),
        lambda login: login.last_error("job"),
        lambda login: login.remove(["thesis.pdf"]),
    ],
)
def test_without_the_work_folder_nothing_is_done_in_the_home(home, folder, act):
    with pytest.raises(HostError, match=f"the work folder {folder} is missing"):
        act(SlurmLogin(LocalTransport("login"), folder))
    assert files_of(home) == {*OTHERS}


def test_the_last_submission_takes_a_folder_of_orch_along(home, tmp_path):
    work = tmp_path / "work"
    for name in (".orch-work", "submitted/a/job.sh", "controller-0123456789abcdef/x", "venv/x", "locks/x"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).touch()
    login = SlurmLogin(LocalTransport("login"), str(work))
    login.remove(["b"])
    assert (work / "submitted/a/job.sh").exists() and (work / "venv/x").exists()
    login.remove(["a"])
    assert not work.exists()
    login.remove(["a"])  # a second `orch down`
    assert tmp_path.is_dir()


def test_a_work_folder_that_held_other_files_keeps_them(home):
    (home / "submitted/thesis.pdf").unlink()
    SlurmLogin(LocalTransport("login"), "~/../home").remove(["a"])
    assert files_of(home) == {*OTHERS} - {"submitted/thesis.pdf"}


def submission(work: Path, **files: str) -> SlurmLogin:
    (work / "submitted/j").mkdir(parents=True)
    for name, text in files.items():
        (work / "submitted/j" / name).write_text(text)
    return SlurmLogin(LocalTransport("login"), str(work))


def test_a_file_that_cannot_be_read_is_not_taken_for_absent(tmp_path):
    login = submission(tmp_path, started="line\n")
    assert login.text_of("j", "started") == "line\n"
    assert login.text_of("j", "other") == login.text_of("gone", "started") == ""
    (tmp_path / "submitted/j/broken").symlink_to("broken")  # fails for root, too
    with pytest.raises(HostError, match="symbolic links"):
        login.text_of("j", "broken")


@pytest.mark.parametrize(("states", "holds"), [("RUNNING", True), ("COMPLETING", False), ("", False)])
def test_commands_go_to_hosts_that_the_job_holds(tmp_path, monkeypatch, states, holds):
    assert slurm_transport(tmp_path, monkeypatch, states)._is_held is holds


@pytest.mark.parametrize("states", ["SUSPENDED", "RUNNING\nSUSPENDED", "STOPPED"])
def test_a_suspended_job_is_no_lost_one(tmp_path, monkeypatch, states):
    with pytest.raises(ConnectError, match="Slurm has suspended job 7"):
        slurm_transport(tmp_path, monkeypatch, states)


def slurm_transport(folder: Path, monkeypatch, states: str) -> SlurmTransport:
    squeue = folder / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '{states}'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return SlurmTransport(LocalTransport("login"), "v100", "7+0")
