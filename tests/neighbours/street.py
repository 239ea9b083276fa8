"""Two hosts with two logins, and the homes of all who share them.

    with Street() as street:
        done = street.types(PEOPLE["ada-x"], "down", "--yes", "--discard", "--cluster", "x")

The hosts' Python has a `torch` that starts ranks and nothing else: what is asked here is whose files and processes are
touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from pathlib import Path

import lab_net
import yaml

from orchestrator.owner import read_owner
from orchestrator.paths import Home
from tests.support import forks
from tests.support.lab import Lab, lab

from .people import PEOPLE, Person

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
SETUP = f"""
set -e
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
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="orch-neighbours-")))
        self.lab = self._stack.enter_context(lab(INVENTORY, quick=True))
        for host in HOSTS:
            made = self.lab.host_exec(host, ["sh", "-s"], input=SETUP)
            assert made.returncode == 0, made.stderr
            for login in LOGINS:
                for name in OWN_FILES:
                    self.write(host, login, name, f"{name} of {login}\n")
        for person in PEOPLE.values():
            self._furnish(person)
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
        content["defaults"] |= {"user": person.login}
        self.inventory(person).write_text(yaml.safe_dump(content))
        code = self.folder / person.name
        code.mkdir()
        (code / "script.py").write_bytes(Path(__file__).with_name("script.py").read_bytes())
        (code / "whose.txt").write_text(person.code)
        self.home(person).parent.mkdir(exist_ok=True)

    def types(self, person: Person, *words: str) -> subprocess.CompletedProcess[str]:
        """One command of theirs, in a process of its own, in the lab's controller network."""
        kept = {name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"}
        settled = {"ORCH_HOME": str(self.home(person)), "ORCH_SSH_CONFIG": "/dev/null", "COLUMNS": "400"}
        network = lab_net.NETNS / lab_net.controller_namespace(self.lab.cluster)
        folder = self.home(person).parent
        return forks.run(forks.ORCH, words, env={**kept, **settled}, cwd=folder, network=network)

    # ---- the hosts, from outside ----------------------------------------------------------------------------------

    def disk(self, host: str) -> Path:
        """The host's /home, as it lies on this machine's disk."""
        return DISKS / self.lab.cluster / host / "home"

    def work(self, host: str, login: str) -> Path:
        return self.disk(host) / login / ".orch"

    def leave_stray(self, host: str, person: Person, job: str) -> None:
        """A process of theirs that no supervisor watches, and the folder of its job."""
        folder = f"/home/{person.login}/.orch/jobs/{job}"
        record = {"job": job, "owner": read_owner(Home(self.home(person))).model_dump(), "cluster": person.cluster}
        self.write(host, person.login, f".orch/jobs/{job}/node.json", json.dumps(record))
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
