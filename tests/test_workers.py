"""Tests that workers run: all of them, each part in one process and in order, and those that end one are failures."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

CONFTEST = """
import os, pytest
from tests.support.workers import Workers

def pytest_configure(config):
    config.pluginmanager.register(Workers(2))

@pytest.fixture(scope="session")
def once():
    yield os.getpid()
    print(f"over {os.getpid()}", file=open("over", "a"))
"""
PASSES = """
import os
seen = []

def test_first(once, tmp_path):
    seen.append((once, tmp_path))
    assert once == os.getpid()

def test_second(once, tmp_path):
    (pid, path), = seen
    assert pid == os.getpid() and path.parent == tmp_path.parent
    print("heard by nobody")
"""
ENDS = """
import os, pytest

def test_dies():
    os.kill(os.getpid(), 9)

def test_comes_after():
    pass

def test_fails():
    print("said before")
    assert "left" == "right"

@pytest.mark.skip(reason="for this")
def test_skipped():
    pass
"""
APART = ("test_b",)
"""In a folder of its own."""
WAITS = """
import time

def test_waits(once):
    open(f"begun-{once}", "w").close()
    time.sleep(600)
"""


def folder_of(tmp_path: Path, **files: str) -> Path:
    for name, text in {"conftest": CONFTEST, **files}.items():
        path = tmp_path / (f"{name}/{name}.py" if name in APART else f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def begun(folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "pytest", "-v", "-ra", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=."]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.Popen([*words, "."], cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


def test_each_file_is_run_whole_by_one_worker_and_a_test_that_ends_its_worker_fails_alone(tmp_path: Path) -> None:
    # The first file is the one that ends its worker: a later one might end the only worker with something to take down.
    folder = folder_of(tmp_path, test_0_ends=ENDS, test_a=PASSES, test_b=PASSES)
    with begun(folder) as run:
        text, _ = run.communicate(timeout=120)
    assert re.search(r"=+ 2 failed, 5 passed, 1 skipped in ", text), text
    assert "heard by nobody" not in text
    for line in (
        "FAILED test_0_ends.py::test_dies - the worker that ran it has ended: -9",
        "FAILED test_0_ends.py::test_fails - AssertionError: assert 'left' == 'right'",
        "SKIPPED [1] test_0_ends.py:14: for this",
    ):
        assert line in text
    assert "said before" in text
    assert 1 <= len((folder / "over").read_text().splitlines()) <= 2  # a worker's own, torn down once


def test_when_a_person_ends_them_what_they_had_begun_is_taken_down(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, test_a=WAITS, test_b=WAITS)
    with begun(folder) as run:
        while len(pids := {path.name.partition("-")[2] for path in folder.glob("begun-*")}) < 2:
            assert run.poll() is None
            time.sleep(0.02)
        run.send_signal(signal.SIGINT)
        text, _ = run.communicate(timeout=120)
    assert "KeyboardInterrupt" in text
    assert {line.split()[1] for line in (folder / "over").read_text().splitlines()} == pids
