"""A Slurm cluster for tests: `deploy/slurm_lab.sh` brings it up, in network namespaces of this machine, and down again.

    with slurm_lab() as lab:
        lab.exec("sinfo")                  # on the login host, as the lab's user
        lab.crash("v100")

This machine reaches the login host only. Several test runs have a cluster each.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "deploy/slurm_lab.sh"
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class SlurmLab:
    """python: has to be readable for its user."""

    folder: Path
    network: str
    user: str
    python: str
    environment: dict[str, str]

    @property
    def work(self) -> Path:
        """The user's, on a disk that all hosts share."""
        return self.folder / "work" / self.user

    @property
    def login(self) -> str:
        return f"{self.user}@{self.network}.1"

    @property
    def keys(self) -> dict[str, str]:
        """For `defaults` of an inventory."""
        host_key = (self.folder / "ssh/known_hosts").read_text().partition(" ")[2].strip()
        return {"key_file": str(self.folder / f"ssh/id.{self.user}"), "host_key": host_key, "python": self.python}

    def of(self, user: str) -> SlurmLab:
        """Another Unix user on the same cluster; creates the user if necessary."""
        other = replace(self, user=user, environment={**self.environment, "LAB_USER": user})
        other._program("up")
        return other

    def exec(self, *argv: str, **options: Any) -> str:
        """Its standard output. Raises CalledProcessError."""
        return self._program("exec", *argv, **options)

    def on(self, node: str, *argv: str) -> str:
        return self._program("on", node, *argv)

    def ssh_address(self, node: str) -> str:
        """Starts an SSH server on this node, which clusters with Slurm may not have."""
        config = self.folder / "ssh/sshd_config.nodes"
        lines = (self.folder / "ssh/sshd_config").read_text().splitlines()
        config.write_text("\n".join(line for line in lines if not line.startswith("ListenAddress")) + "\n")
        self.on(node, "/usr/sbin/sshd", "-f", str(config))
        return self.on(node, "hostname", "--all-ip-addresses").split()[0]

    def crash(self, node: str) -> None:
        self._program("crash", node)

    def reboot(self, node: str) -> None:
        self._program("reboot", node)

    def processes(self, node: str) -> list[str]:
        """Command lines of the user's processes there, without Slurm's own."""
        lines = self.on(node, "ps", "-e", "-o", "args=").splitlines()
        return [line for line in lines if str(self.work) in line or "orch" in line]

    def _program(self, *words: str, **options: Any) -> str:
        settings = {"capture_output": True, "text": True, "timeout": 240, "check": True, **options}
        return str(subprocess.run([PROGRAM, *words], env=self.environment, **settings).stdout)


@contextlib.contextmanager
def slurm_lab(**variables: str) -> Iterator[SlurmLab]:
    """variables: see the program, like NODES."""
    if why := obstacle():
        pytest.skip(why)
    for name in _of_dead_runs():
        _down({**os.environ, "PATH": PATH, "NAME": name})
    pid = os.getpid()
    name, network = f"s{pid}", f"10.{78 + pid // 250 % 100}.{pid % 250}"
    environment = {**os.environ, "PATH": PATH, "NAME": name, "NET": network, "LAB_USER": _user(), **variables}
    lab = SlurmLab(Path(f"/run/slurm-{name}"), network, environment["LAB_USER"], sys.executable, environment)
    try:
        lab._program("up")
        yield lab
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{error}: {error.stdout}{error.stderr}")
    finally:
        _down(environment)


def _down(environment: dict[str, str]) -> None:
    subprocess.run([PROGRAM, "down"], env=environment, timeout=120, check=True, capture_output=True)


def _of_dead_runs() -> list[str]:
    pids = [path.name.removeprefix("slurm-s") for path in Path("/run").glob("slurm-s[0-9]*")]
    return [f"s{pid}" for pid in pids if not Path("/proc", pid).exists()]


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
