"""Two hosts with two logins, and the homes of all who share them.

    with Street() as street:
        done = street.types(PEOPLE["ada-x"], "down", "--yes", "--cluster", "x")

The hosts' Python has a `torch` that starts rank wrappers and nothing else: what is asked here is whose files and
processes are touched, and torch takes seconds a start.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import lab_net
import yaml
from crowd import DISTRIBUTED, TORCH
from lab import Lab, lab

from orchestrator.owner import read_owner
from orchestrator.paths import Home
from tests.chaos.world import enter_network

from .people import PEOPLE, Person
from .typist import types

HOSTS = ("alpha", "beta")
DISKS = Path("/var/lib/orch-lab")
LOGINS = {"lab": 1000, "other": 1001}
INVENTORY = """
cluster: street
defaults: {device: cpu, bandwidth: 1Gbps}
nodes:
  - {name: alpha, host: 10.77.31.1}
  - {name: beta, host: 10.77.31.2}
"""
PYTHON = "/home/quick/bin/python"
RUN = """
import os, subprocess, sys
from .elastic.rendezvous import static_tcp_rendezvous
def main():
    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    first, ranks = int(options["--node-rank"]), int(options["--nproc-per-node"])
    assert ranks == 1
    command = sys.argv[sys.argv.index("--no-python") + 1:]
    place = {"RANK": str(first), "LOCAL_RANK": "0", "WORLD_SIZE": options["--nnodes"], "LOCAL_WORLD_SIZE": "1"}
    sys.exit(subprocess.run(command, env={**os.environ, **place}, start_new_session=True).returncode)
"""
SETUP = f"""
set -e
{sys._base_executable} -m venv --without-pip /home/quick
cd /home/quick/lib/python*/site-packages
mkdir -p torch/_C torch/distributed/elastic/rendezvous torchvision
cat > torch/__init__.py <<'END'{TORCH}END
echo '{DISTRIBUTED}' > torch/distributed/__init__.py
cat > torch/distributed/run.py <<'END'{RUN}END
touch torch/_C/__init__.py torch/distributed/elastic/__init__.py torch/distributed/elastic/rendezvous/__init__.py
echo 'class TCPStore: __init__ = lambda: 0' > torch/_C/_distributed_c10d.py
cp torch/_C/_distributed_c10d.py torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py
echo '__version__ = "0.24.0"' > torchvision/__init__.py
{PYTHON} -m compileall -q .
echo 'other:x:{LOGINS["other"]}:{LOGINS["other"]}::/home/other:/bin/bash' >> /etc/passwd
echo 'other:x:{LOGINS["other"]}:' >> /etc/group
echo 'other:*:19000:0:99999:7:::' >> /etc/shadow
install -d -m 700 -o other -g other /home/other /home/other/.ssh
install -m 600 -o other -g other /home/lab/.ssh/authorized_keys /home/other/.ssh/authorized_keys
"""
OWN_FILES = ("thesis.tex", "jobs/2024/results.csv", ".orch.txt")
STREWN = ("code/thesis.tex", "jobs/2024/results.csv", "venv/keep.txt", "notes")


class Street:
    lab: Lab
    folder: Path

    def __enter__(self) -> Street:
        self._stack = contextlib.ExitStack()
        self.lab = self._stack.enter_context(lab(INVENTORY))
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="orch-neighbours-")))
        for host in HOSTS:
            made = self.lab.host_exec(host, ["sh", "-s"], input=SETUP)
            assert made.returncode == 0, made.stderr
            for login in LOGINS:
                for name in OWN_FILES:
                    self.write(host, login, name, f"{name} of {login}\n")
        for person in PEOPLE.values():
            self._furnish(person)
        controller = lab_net.NETNS / lab_net.controller_namespace(self.lab.cluster)
        self._stack.callback(enter_network(controller))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- who types ------------------------------------------------------------------------------------------------

    def home(self, person: Person) -> Path:
        return self.folder / person.home / "home"

    def runs(self, person: Person) -> Path:
        """Where they collect: each home has a folder with the runs of all its clusters."""
        return self.folder / person.home / "runs"

    def inventory(self, person: Person) -> Path:
        return self.folder / f"{person.name}.yaml"

    def _furnish(self, person: Person) -> None:
        content = yaml.safe_load(self.lab.inventory.read_text())
        content["cluster"] = person.cluster
        content["defaults"] |= {"user": person.login, "python": PYTHON}
        self.inventory(person).write_text(yaml.safe_dump(content))
        code = self.folder / person.name
        code.mkdir()
        (code / "script.py").write_bytes(Path(__file__).with_name("script.py").read_bytes())
        (code / "whose.txt").write_text(person.code)
        self.home(person).parent.mkdir(exist_ok=True)

    def types(self, person: Person, *words: str) -> subprocess.CompletedProcess[str]:
        """One command of theirs, in a process of its own, in the lab's controller network."""
        return types(words, home=self.home(person), folder=self.home(person).parent)

    # ---- the hosts, from outside ----------------------------------------------------------------------------------

    def disk(self, host: str) -> Path:
        """The host's /home, as it lies on this machine's disk."""
        return DISKS / self.lab.cluster / host / "home"

    def work(self, host: str, login: str) -> Path:
        return self.disk(host) / login / ".orch"

    def leave_stray(self, host: str, person: Person, job: str) -> None:
        """A process of theirs that no supervisor watches, and the folder of its job."""
        folder = f"/home/{person.login}/.orch/jobs/{job}"
        told = {"job": job, "owner": read_owner(Home(self.home(person))).model_dump(), "cluster": person.cluster}
        self.write(host, person.login, f".orch/jobs/{job}/node.json", json.dumps(told))
        number = str(LOGINS[person.login])
        become = ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups", "--"]
        line = f"ORCH_JOB_DIR={folder} exec setsid -f sleep 1000001 </dev/null >/dev/null 2>&1"
        started = self.lab.host_exec(host, [*become, "sh", "-c", line])
        assert started.returncode == 0, started.stderr

    def write(self, host: str, login: str, name: str, text: str) -> None:
        """A file of the login's own, and every folder above it."""
        path = self.disk(host) / login
        for part in Path(name).parent.parts:
            path = path / part
            if not path.exists():
                path.mkdir(mode=0o700)
                os.chown(path, LOGINS[login], LOGINS[login])
        file = path / Path(name).name
        file.write_text(text)
        os.chown(file, LOGINS[login], LOGINS[login])
