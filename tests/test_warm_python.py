"""What a Python that begins with torch imported runs, as a fresh one would run it (`support/warm_python.py`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.quick_python import quick_python
from tests.support.sshd import wait_for

SEES = """
import json, os, sys, beside
seen = {"argv": sys.argv, "name": __name__, "file": __file__, "first": sys.path[0], "executable": sys.executable}
seen |= {"folder": os.getcwd(), "mask": os.umask(0), "own": os.environ["OWN"], "parent": "PYTEST_VERSION" in os.environ}
seen |= {"main": sys.modules["__main__"].seen is seen, "stdin": sys.stdin.read(), "given": os.read(7, 9).decode()}
seen["files"] = [number for number in range(20) if os.path.exists(f"/proc/self/fd/{number}")]
print(json.dumps(seen), flush=True)
print("an error", file=sys.stderr)
"""
ENDS = """
import atexit, os, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
END
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    return quick_python(tmp_path_factory.mktemp("python") / "quick", torchrun=True)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sees.py").write_text(SEES)
    (tmp_path / "mine" / "beside.py").touch()
    return tmp_path


def seen_by(python: str, words: list[str], folder: Path) -> tuple[int, str, str]:
    """How it ends, and what it prints: with one more descriptor, 7, and a mask that is not ours."""
    read, write = os.pipe()
    os.write(write, b"by number")

    def prepare() -> None:
        os.dup2(read, 7)
        os.umask(0o027)

    environment = {"PATH": os.environ["PATH"], "OWN": "its \udcff own"}
    argv, options = [python, *words], {"input": "typed", "capture_output": True, "text": True}
    done = subprocess.run(
        argv, cwd=folder, env=environment, preexec_fn=prepare, pass_fds=[7], **options, errors="replace"
    )
    os.close(read)
    os.close(write)
    return done.returncode, done.stdout.replace(python, "PYTHON"), done.stderr


@pytest.mark.parametrize(
    "words", [["mine/sees.py", "-u", "x y"], ["-u", "-m", "mine.sees", "--"]], ids=["file", "module"]
)
def test_a_program_sees_what_it_would_see_in_a_fresh_python(python, folder, words):
    (folder / "beside.py").touch()
    expected = seen_by(sys.executable, words, folder)
    assert expected[0] == 0, expected
    assert '"given": "by number"' in expected[1]
    assert seen_by(python, words, folder) == expected


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(7)",
        "sys.exit('no')",
        "1 / 0",
        "os._exit(3)",
        "os.kill(os.getpid(), 11)",
        "raise KeyboardInterrupt",
    ],
)
def test_a_program_ends_as_it_would_in_a_fresh_python(python, tmp_path, end):
    (tmp_path / "ends.py").write_text(ENDS.replace("END", end))
    options = {"cwd": tmp_path, "capture_output": True, "text": True}
    expected, found = (subprocess.run([one, "ends.py"], **options) for one in (sys.executable, python))
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


HEARS = """
import os, signal, sys, torch
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
print(os.getpid(), flush=True)
while True: signal.pause()
"""


def test_a_signal_reaches_the_program_and_whoever_is_killed_takes_it_along(python, tmp_path):
    (tmp_path / "hears.py").write_text(HEARS)
    for number, code in ((signal.SIGTERM, 9), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)):
        argv = [python, "hears.py"]
        with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            program = int(process.stdout.readline())
            process.send_signal(number)
            assert process.wait(10) == code
            wait_for(lambda pid=program: not is_there(pid), "the program to end")


def is_there(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_torch_is_there_before_the_program_asks_for_it(python, tmp_path):
    """Else all of this would be for nothing. A rank's wrapper needs no torch, and is fresh."""
    (tmp_path / "orch_remote").mkdir()
    for name in ("asks.py", "orch_remote/rank.py"):
        (tmp_path / name).write_text("import sys\nprint('torch' in sys.modules)\n")
    said = [
        subprocess.run([python, *words], cwd=tmp_path, capture_output=True, text=True).stdout.strip()
        for words in (["asks.py"], ["-m", "orch_remote.rank"])
    ]
    assert said == ["True", "False"]
