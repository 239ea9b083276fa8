"""A Slurm cluster for tests: `deploy/slurm_lab.sh` brings it up, in network namespaces of this machine, and down again.

    with slurm_lab() as lab:
        lab.exec("sinfo")                  # on the login host, as the lab's user
        lab.crash("v100")

This machine reaches the login host only. There is one such cluster at a time: others wait for their turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "deploy/slurm_lab.sh"
LAB = Path("/run/slurm-lab")
LOGIN = "10.77.0.1"
TURN_S = 900.0
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class SlurmLab:
    """work: a folder that all hosts share, the user's. python: one that its user can start."""

    user: str
    work: Path
    python: str
    environment: dict[str, str]

    @property
    def login(self) -> str:
        return f"{self.user}@{LOGIN}"

    @property
    def key(self) -> Path:
        return LAB / "ssh/id"

    @property
    def host_key(self) -> str:
        return (LAB / "ssh/known_hosts").read_text().partition(" ")[2].strip()

    def exec(self, *argv: str, **options: Any) -> str:
        """Its standard output. Raises CalledProcessError."""
        return self._program("exec", *argv, **options)

    def on(self, node: str, *argv: str) -> str:
        return self._program("on", node, *argv)

    def crash(self, node: str) -> None:
        self._program("crash", node)

    def reboot(self, node: str) -> None:
        self._program("reboot", node)

    def processes(self, node: str) -> list[str]:
        """Command lines of the user's processes there, without Slurm's own."""
        lines = self.on(node, "ps", "-e", "-o", "args=").splitlines()
        return [line for line in lines if str(self.work) in line or "orch" in line]

    def _program(self, *words: str, **options: Any) -> str:
        settings = {"capture_output": True, "text": True, "timeout": 120, "check": True, **options}
        return str(subprocess.run([PROGRAM, *words], env=self.environment, **settings).stdout)


@contextlib.contextmanager
def slurm_lab(**variables: str) -> Iterator[SlurmLab]:
    """variables: see the program, like NODES."""
    if why := obstacle():
        pytest.skip(why)
    with _turn(), tempfile.TemporaryDirectory(prefix="orch-slurm-") as folder:
        environment = {**os.environ, "PATH": PATH, "LAB": str(LAB), "LAB_USER": _user(), **variables}
        work = Path(folder, "work")
        lab = SlurmLab(environment["LAB_USER"], work, sys.executable, environment)
        try:
            lab._program("down")  # of a test run that was killed
            lab._program("up")
            Path(folder).chmod(0o711)
            work.mkdir(mode=0o700)
            shutil.chown(work, lab.user)
            yield lab
        except subprocess.CalledProcessError as error:
            pytest.fail(f"{error}: {error.stdout}{error.stderr}")
        finally:
            lab._program("down")


@functools.cache
def obstacle() -> str:
    """Why no such cluster can run here; "" if one can."""
    missing = [
        name for name in ("slurmctld", "slurmd", "munged", "sshd", "ip", "tc") if not shutil.which(name, path=PATH)
    ]
    if missing:
        return f"needs {', '.join(missing)}: `make packages` installs Slurm"
    return "" if os.geteuid() == 0 else "network namespaces need root"


def _user() -> str:
    """A user of its own, unless only root can read this Python or the code."""
    there = subprocess.run(["id", "slurmer"], capture_output=True, check=False)
    if there.returncode:
        subprocess.run(["useradd", "--create-home", "--shell", "/bin/bash", "slurmer"], check=True)
    line = [
        "setpriv",
        "--reuid=slurmer",
        "--regid=slurmer",
        "--init-groups",
        sys.executable,
        "-c",
        "import torch.version",
    ]
    can = subprocess.run(line, cwd="/", capture_output=True, check=False).returncode == 0
    return "slurmer" if can else "root"


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    with open("/run/slurm-lab.lock", "w") as file:
        until_s = time.monotonic() + TURN_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    pytest.skip("another test run has had the Slurm cluster for 15 minutes")
                time.sleep(0.2)
        yield
