"""A test run with workers that a signal ends leaves no process, no laboratory, no mount and no file."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.support.guard import descendants
from tests.support.sshd import needs_sshd, wait_for

ROOT = Path(__file__).parents[1]
TESTS = {
    "test_lab.py": """
import time
from pathlib import Path
from tests.support.lab import lab

def test_hosts():
    with lab("cluster: ended\\nnodes: [{name: a, host: 10.77.9.1}, {name: b, host: 10.77.9.2}]"):
        Path("lab").touch()
        time.sleep(600)
""",
    "test_job.py": '''
import subprocess, time
from pathlib import Path
from tests.support.disks import small_disk
from tests.support.local_job import gang
from tests.support.sshd import running_sshd

SCRIPT = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen(["env", "-i", "setsid", "-f", "sleep", "1000"])
time.sleep(600)
"""

def test_job(tmp_path):
    subprocess.run(["env", "-i", "setsid", "-f", "sleep", "1001"], check=True)  # no fixture ends it
    with running_sshd(tmp_path / "host"), small_disk(tmp_path / "disk", "1m"), gang(tmp_path, SCRIPT) as job:
        job.launch()
        job.wait_running()
        Path("job").touch()
        time.sleep(600)
''',
}
PARENT = """
import ctypes, json, os, subprocess, sys
from tests.support.guard import descendants
ctypes.CDLL(None).prctl(36, 1)  # whatever the run leaves becomes a child of this process
words = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "/dev/null"]
run = subprocess.Popen([*words, "--rootdir=.", "--workers", "2", "."], stdout=2, start_new_session=True)
code = run.wait()
print(json.dumps([code, [open(f"/proc/{pid}/cmdline").read() for pid in descendants(os.getpid())]]))
"""


def labs_of(pids: Collection[int]) -> list[str]:
    """Network namespaces and folders of laboratories that these test processes made."""
    tops = [top for top in map(Path, ("/run/netns", "/run/orch-lab", "/var/lib/orch-lab")) if top.is_dir()]
    names = [path.name for top in tops for path in top.iterdir()]
    return [name for name in names if (maker := re.search(r"ended-t(\d+)-", name)) and int(maker[1]) in pids]


@needs_sshd
@pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_to_a_run_with_workers_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    folder, files = tmp_path / "tests", tmp_path / "files"
    folder.mkdir()
    files.mkdir()
    for name, text in TESTS.items():
        (folder / name).write_text(text)
    env = {**os.environ, "TMPDIR": str(files), "HOME": str(files), "PYTHONPATH": str(ROOT)}
    with (
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", PARENT],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as parent,
    ):
        wait_for(lambda: all((folder / name).exists() for name in ("lab", "job")), "a laboratory and a job", 120)
        pids = descendants(parent.pid)
        standing = labs_of(pids)
        if number == signal.SIGTERM:
            os.kill(pids[0], number)
        else:  # as a terminal sends them
            os.killpg(pids[0], number)
        code, left = json.loads(parent.communicate(timeout=120)[0])
    assert (code, left, len(standing) > 4) == (pytest.ExitCode.INTERRUPTED, [], True), (tmp_path / "log").read_text()
    assert labs_of(pids) == []
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    assert [line for line in mounts if any(name in line for name in (str(tmp_path), *standing))] == []
    assert [path for path in files.rglob("*") if not path.is_dir()] == []
