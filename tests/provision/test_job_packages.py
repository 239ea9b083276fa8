"""`--requirements` of a run: real environments by a real pip, from wheels made by hand, on two hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.planning import Requirements, read_requirements
from tests.provision.test_setup import wheel
from tests.support import forks
from tests.support.local_cluster import Place
from tests.support.quick_python import quick_python, with_quick_venv

SCRIPT = """import sys
print("python", sys.executable)
import greeting
print("greeting", greeting.TEXT)
import torch
print("torch", torch.__file__)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("person")
    python = with_quick_venv(quick_python(folder / "quick"), folder / "pip")
    place = Place(folder, python)
    (place.here / "proj/greets.py").write_text(SCRIPT)
    (place.here / "wheels").mkdir()
    wheel(place.here / "wheels", "greeting", "1.0", {"greeting/__init__.py": "TEXT = 'hello'\n"})
    wheel(place.here / "wheels", "greeting", "2.0", {"greeting/__init__.py": "TEXT = 'good day'\n"})
    return place


def requirements(place: Place, *lines: str, name: str = "requirements.txt") -> str:
    text = "\n".join(("--no-index", f"--find-links {place.here / 'wheels'}", *lines))
    (place.here / name).write_text(f"{text}\n")
    return name


def venvs(place: Place, node: str) -> list[Path]:
    return sorted((place.folder / node / "venv").glob("torch-0+*"))


def test_each_host_installs_them_once_and_keeps_its_torch(place: Place) -> None:
    file = requirements(place, "greeting==1.0")
    first = place.types("run", "--requirements", file, "proj/greets.py")
    assert first.stdout.count("greeting hello") == 2
    assert "a: adds packages" in first.stderr and "b: adds packages" in first.stderr
    for node in "ab":
        (venv,) = venvs(place, node)
        assert f"python {venv}/bin/python" in first.stdout
    assert first.stdout.count(f"torch {place.folder}/quick") == 2
    again = place.types("run", "--requirements", file, "proj/greets.py")
    assert again.stdout.count("greeting hello") == 2 and "adds packages" not in again.stderr


def test_other_packages_are_another_environment_and_a_job_file_names_them(place: Place, tmp_path: Path) -> None:
    file = requirements(place, "greeting>=2", name="newer.txt")
    place.types("run", "--requirements", file, "--save", "job.yaml", "--dry-run", "proj/greets.py")
    assert "requirements: newer.txt" in (place.here / "job.yaml").read_text()
    assert "greeting good day" in place.types("run", "--nodes", "a", "job.yaml", cwd=".").stdout
    assert (
        "greeting hello"
        in place.types(
            "run", "--nodes", "a", "--requirements", requirements(place, "greeting==1.0"), "proj/greets.py"
        ).stdout
    )


def test_two_jobs_at_once_build_once(place: Place) -> None:
    file = requirements(place, "greeting==2.0", name="both.txt")
    said = []

    def run() -> None:
        said.append(place.types("run", "--nodes", "b", "--requirements", file, "proj/greets.py"))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("greeting good day" in done.stdout for done in said) and len(said) == 2
    assert sum("adds packages" in done.stderr for done in said) == 1


def test_an_interrupted_build_is_made_again(place: Place) -> None:
    file = requirements(place, "greeting==1.0 ; python_version > '3'", name="cut.txt")
    before = set(venvs(place, "a"))
    env = {**os.environ, "ORCH_HOME": str(place.folder / "home"), "COLUMNS": "400"}
    words = ["run", "--nodes", "a", "--requirements", file, "proj/greets.py"]
    with forks.start(forks.ORCH, words, env=env, cwd=place.here) as run:
        for line in run.stderr:
            if "adds packages" in line:
                break
        run.send_signal(signal.SIGKILL)
        run.communicate(60)
    (half,) = set(venvs(place, "a")) - before
    assert "is_whole" not in json.loads((half / "orch-venv.json").read_text())
    assert "greeting hello" in place.types(*words).stdout


def test_a_package_that_no_index_has_is_named_and_nothing_starts(place: Place) -> None:
    file = requirements(place, "no-such-package", name="none.txt")
    done = place.types("run", "--nodes", "a", "--requirements", file, "proj/greets.py", code=3)
    assert "no-such-package" in done.stderr and "a: pip: " in done.stderr
    assert "--torch" not in done.stderr, "nobody has asked for another torch"


def test_the_error_of_a_missing_module_names_the_option(place: Place) -> None:
    done = place.types("run", "--nodes", "a", "proj/greets.py", code=1)
    assert "`orch run --requirements FILE` installs packages for the job" in done.stderr


def test_a_sweeps_jobs_have_them_too(place: Place) -> None:
    file = requirements(place, "greeting==2.0")
    place.types("sweep", "--grid", "x=1,2", "--requirements", file, "proj/greets.py")


def test_down_removes_the_environments(place: Place) -> None:
    place.types("down", "--yes", "--discard")
    assert not venvs(place, "a") and not venvs(place, "b")


def test_a_projects_lock_is_exported_by_uv_here(place: Place, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name, needs in (("greeting", ""), ("nvidia_cublas_cu12", ""), ("torch", "nvidia-cublas-cu12")):
        wheel(tmp_path, name, "2.0", {f"{name}/__init__.py": ""}, needs)
    project = tmp_path / "locked"
    project.mkdir()

    def locked(*dependencies: str) -> Requirements:
        listed = json.dumps(dependencies)
        text = f'[project]\nname = "x"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = {listed}\n'
        (project / "pyproject.toml").write_text(text)
        uv = ["uv", "lock", "--offline", "--no-index", f"--find-links={tmp_path}"]
        subprocess.run(uv, cwd=project, check=True, capture_output=True)
        return read_requirements(project / "pyproject.toml")

    (project / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n')
    with pytest.raises(UsageError, match=r"no uv\.lock"):
        read_requirements(project / "pyproject.toml")
    assert locked("greeting").packages == ("greeting==2.0",)
    found = locked("greeting", "torch>=2")
    assert set(found.packages) == {"greeting==2.0", "torch==2.0", "nvidia-cublas-cu12==2.0"} and found.name_torch
    (project / "uv.lock").write_text("no lock\n")
    with pytest.raises(UsageError, match="`uv export` failed"):
        read_requirements(project / "pyproject.toml")
