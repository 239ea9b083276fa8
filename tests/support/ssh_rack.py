"""A cluster of two hosts behind real SSH servers of this machine, and a third one that is off, in an $ORCH_HOME.

with ssh_rack(folder) as rack:
    rack.types("exec", "--nodes", "a2000,v100", "--", "hostname", exit_code=0).stdout
"""

from __future__ import annotations

import contextlib
import getpass
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import forks
from tests.support.free_port import free_port
from tests.support.quick_python import quick_python
from tests.support.sshd import Sshd, make_key, running_sshd

INVENTORY = """
cluster: rack
defaults:
  {{device: cpu, python: {python}, user: {user}, key_file: {key}, bandwidth: 2.5Gbps, paced: {{samples_per_s: 333}}}}
nodes:
  - {{name: a2000, host: 127.0.0.1, port: {a2000}, workdir: {folder}/one}}
  - {{name: v100, host: 127.0.0.1, port: {v100}, workdir: {folder}/two}}
  - {{name: gone, host: 127.0.0.1, port: {gone}, workdir: {folder}/three}}
"""


@dataclass(frozen=True)
class Rack:
    """folder: where commands are typed. servers: by node."""

    folder: Path
    servers: dict[str, Sshd]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "ORCH_HOME": str(self.folder / "home"), "ORCH_SSH_CONFIG": "/dev/null"}

    def types(self, *words: str, exit_code: int = 0, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        done = forks.run(forks.ORCH, words, cwd=self.folder, env=self.environment, timeout=timeout_s)
        assert done.returncode == exit_code, f"{words} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done

    def starts(self, *words: str) -> forks.Forked:
        return forks.start(forks.ORCH, words, cwd=self.folder, env=self.environment, session=True)


@contextlib.contextmanager
def ssh_rack(folder: Path) -> Iterator[Rack]:
    key = make_key(folder / "id")
    with contextlib.ExitStack() as running:
        servers = {n: running.enter_context(running_sshd(folder / n, key=key)) for n in ("a2000", "v100")}
        ports = {name: server.port for name, server in servers.items()}
        text = INVENTORY.format(
            python=quick_python(folder / "python"), user=getpass.getuser(), key=key, folder=folder, gone=free_port(),
            **ports,
        )  # fmt: skip
        (folder / "rack.yaml").write_text(text)
        rack = Rack(folder, servers)
        rack.types("up", "rack.yaml", "--accept-new-host-keys", exit_code=3)  # one of them is off
        yield rack
