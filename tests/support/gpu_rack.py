"""Hosts behind real SSH servers of this machine, each with a GPU that only its stand-in for nvidia-smi knows.

with gpu_rack(folder) as rack:                          # two hosts, a and b
    alice = rack.person("alice")                        # an $ORCH_HOME with the cluster in it
    job = alice.starts("run", "--wait", "train.py")     # of `forks`, as soon as it is forked

Their GPUs have UUIDs of their own in every rack, so that the claims of two tests never meet.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import forks
from tests.support.quick_python import quick_python
from tests.support.sshd import Sshd, make_key, running_sshd

INVENTORY = """
cluster: rack
defaults: {{python: {python}, user: {user}, key_file: {key}, bandwidth: 2.5Gbps}}
nodes:
"""
NODE = "  - {{name: {node}, host: 127.0.0.1, port: {port}, workdir: {workdir}}}\n"
SMI = """#!/bin/sh
case $1 in
  --query-compute-apps=*) ;;
  --query-gpu=*) echo '0, Tesla V100-PCIE-16GB, {uuid}, 16384, 0, 525.105.17, 00000000:3B:00.0, Default, 7.0';;
  *) exit 2;;
esac
"""
CUDA = """def is_available(): return True
def device_count(): return 1
def get_arch_list(): return ["sm_70"]
"""
UNTIL_TOLD = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)\n"


@dataclass(frozen=True)
class Person:
    """Somebody with a home and work folders of their own."""

    folder: Path

    @property
    def _options(self) -> dict[str, Any]:
        env = {**os.environ, "ORCH_HOME": str(self.folder / "home"), "ORCH_SSH_CONFIG": "/dev/null", "COLUMNS": "300"}
        return {"cwd": self.folder, "env": env}

    def types(self, *words: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        done = forks.run(forks.ORCH, words, **self._options)
        assert done.returncode == exit_code, f"{words} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done

    def starts(self, *words: str) -> forks.Forked:
        return forks.start(forks.ORCH, words, session=True, **self._options)

    def jobs(self) -> dict[str, Any]:
        return dict(json.loads(self.types("jobs", "--json").stdout))


@dataclass(frozen=True)
class GpuRack:
    folder: Path
    servers: dict[str, Sshd]
    uuids: dict[str, str]

    def work(self, person: str, node: str) -> Path:
        return self.folder / "work" / person / node

    def person(self, name: str, login: str = "") -> Person:
        """login: on the hosts; that of the tests without one."""
        person = Person(self.folder / name)
        person.folder.mkdir()
        self.work(name, "").mkdir(parents=True, exist_ok=True)  # both hosts look whether they can make theirs in it
        (person.folder / "train.py").write_text(UNTIL_TOLD)
        python, key = self.folder / "python/bin/python", self.folder / "id"
        text = INVENTORY.format(user=login or getpass.getuser(), python=python, key=key)
        for node, server in self.servers.items():
            text += NODE.format(node=node, port=server.port, workdir=self.work(name, node))
        (person.folder / "rack.yaml").write_text(text)
        person.types("up", "rack.yaml", "--accept-new-host-keys")
        return person


@contextlib.contextmanager
def gpu_rack(folder: Path, hosts: str = "ab") -> Iterator[GpuRack]:
    """hosts: a letter each."""
    key = make_key(folder / "id")
    _of_cuda(Path(quick_python(folder / "python")).parents[1])
    uuids = {node: f"GPU-{uuid.uuid4()}" for node in hosts}
    with contextlib.ExitStack() as running:
        servers = {}
        for node, gpu in uuids.items():
            smi = folder / f"bin-{node}" / "nvidia-smi"
            smi.parent.mkdir()
            smi.write_text(SMI.format(uuid=gpu))
            smi.chmod(0o755)
            environment = [f"PATH={smi.parent}:/usr/local/bin:/usr/bin:/bin"]
            servers[node] = running.enter_context(running_sshd(folder / node, key=key, environment=environment))
        yield GpuRack(folder, servers, uuids)


def _of_cuda(python: Path) -> None:
    """Its torch says that it can use the GPU."""
    (torch,) = python.glob("lib/*/site-packages/torch")
    (torch / "cuda.py").write_text(CUDA)
    (torch / "version.py").write_text('cuda = "12.1"\n')
