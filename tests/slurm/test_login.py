"""Commands on the login host; here it is this machine, with a home of its own."""

from pathlib import Path

import pytest

from orchestrator.errors import HostError
from orchestrator.slurm.login import SlurmLogin
from orchestrator.transport import LocalTransport

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
