"""A lab for integration tests: takes an inventory, gives hosts to log in to, and removes them afterwards.

    with lab("cluster: pair\\nnodes: [{name: a, host: 10.0.0.1}, {name: b, host: 10.0.0.2}]") as pair:
        pair.controller_exec(["orch", "up", str(pair.inventory)])
        pair.host_exec("a", ["ps", "ax"])
        pair.link("b", "down")

Every lab gets a cluster name of its own, so that several test runs may share one machine. Where no lab can stand, the
test is skipped with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.append(str(Path(__file__).resolve().parents[2] / "deploy"))

import lab_enter
import lab_plan

from orchestrator.errors import HostError
from tests.support.quick_python import quick_python

PROGRAM = Path(lab_enter.__file__).with_name("lab.py")
STATE = Path("/run/orch-lab")
USER = "lab"
_count = itertools.count()


@dataclass(frozen=True)
class Lab:
    """A lab that stands. inventory: as given, with this lab's cluster name, its login key and each host's key."""

    cluster: str
    inventory: Path
    nodes: tuple[dict[str, Any], ...]

    @property
    def key(self) -> Path:
        return STATE / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return STATE / self.cluster / "known_hosts"

    @property
    def to_controller(self) -> list[str]:
        """What to write before a command that is to run in the controller's network, as we are."""
        return lab_enter.controller(self.cluster)

    def controller_exec(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs it in the controller's network; options as for subprocess.run, output captured as text."""
        return _run([*self.to_controller, *argv], **options)

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts it in the controller's network; signals and the exit code are its own."""
        return _popen([*self.to_controller, *argv], **options)

    def host_exec(
        self, node: str, argv: Sequence[str], *, as_user: bool = False, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return _run([*self._enter(node, as_user), *argv], **options)

    def host_popen(
        self, node: str, argv: Sequence[str], *, as_user: bool = False, **options: Any
    ) -> subprocess.Popen[str]:
        return _popen([*self._enter(node, as_user), *argv], **options)

    def ssh(self, node: str, command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Logs in from the controller as the host's ordinary user, with strict host keys."""
        entry = next(entry for entry in self.nodes if entry["name"] == node)
        trust = [f"UserKnownHostsFile={self.known_hosts}", "StrictHostKeyChecking=yes"]
        settings = [*trust, "BatchMode=yes", "IdentitiesOnly=yes", "ConnectTimeout=5"]
        flags = [word for setting in settings for word in ("-o", setting)]
        place = ["-p", str(entry.get("port", 22)), f"{entry.get('user', USER)}@{entry['host']}"]
        return self.controller_exec(["ssh", "-F", "none", "-i", str(self.key), *flags, *place, command], **options)

    def link(self, node: str, *words: str) -> None:
        """link("a", "down"), link("a", "rate", "1Gbps", "loss", "5%"), link("a", "up")."""
        _program("link", "--cluster", self.cluster, node, *words, check=True)

    def power(self, node: str, state: str) -> None:
        _program("power", "--cluster", self.cluster, node, state, check=True)

    def _enter(self, node: str, as_user: bool) -> list[str]:
        made = lab_plan.from_json((STATE / self.cluster / "lab.json").read_text())
        try:
            return lab_enter.on_host(made, made.host(node), as_user=as_user)
        except HostError as off:
            return ["sh", "-c", f"echo {shlex.quote(str(off))} >&2; exit {off.exit_code}"]


@contextlib.contextmanager
def lab(
    inventory: str | Path,
    *,
    binds: Iterable[str] = (),
    trust: bool = True,
    quick: bool = False,
    trains: bool = False,
    torchrun: bool = False,
) -> Iterator[Lab]:
    """Brings up the hosts of an inventory (a path, or its text). trust=False leaves the hosts' keys out of it.

    quick: their Python's torch starts ranks and trains nothing (`quick_python`), where the inventory names no other.
    trains: the same, and their ranks have the real torch; torchrun: so has what starts the ranks.
    """
    _skip_unless_possible()
    remove_the_dead()
    content = yaml.safe_load(inventory.read_text() if isinstance(inventory, Path) else inventory)
    content["cluster"] = f"{content['cluster']}-t{os.getpid()}-{next(_count)}"
    content["defaults"] = {"user": USER, "key_file": str(STATE / "id_ed25519"), **(content.get("defaults") or {})}
    nodes = tuple({**content["defaults"], **node} for node in content["nodes"])
    with tempfile.TemporaryDirectory(prefix="orch-lab-") as folder:
        standing = Lab(content["cluster"], Path(folder, "inventory.yaml"), nodes)
        standing.inventory.write_text(yaml.safe_dump(content))
        if quick or trains or torchrun:
            binds = [*binds, f"{folder}/quick"]
            content["defaults"].setdefault(
                "python", quick_python(Path(folder, "quick"), trains=trains, torchrun=torchrun)
            )
            standing.inventory.write_text(yaml.safe_dump(content))
        shown = [word for bind in binds for word in ("--bind", bind)]
        try:
            up = _program("up", str(standing.inventory), *shown)
            assert up.returncode == 0, up.stderr
            if trust:
                for node in content["nodes"]:
                    public = STATE / standing.cluster / node["name"] / "host_key.pub"
                    node.setdefault("host_key", " ".join(public.read_text().split()[:2]))
                standing.inventory.write_text(yaml.safe_dump(content))
            yield standing
        finally:
            _program("down", standing.cluster)


def _program(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, str(PROGRAM), *words], **options)


def _run(argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    settings = {"capture_output": True, "text": True, "timeout": 120, **options}
    return subprocess.run(argv, **settings)


def _popen(argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    settings = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(argv, **settings)


@functools.cache
def _obstacle() -> str:
    listing = _program("list")
    return listing.stderr.strip() if listing.returncode else ""


def _skip_unless_possible() -> None:
    if _obstacle():
        pytest.skip(_obstacle())


def remove_the_dead() -> None:
    """Removes the labs of test runs that have ended."""
    for cluster in os.listdir(STATE) if STATE.is_dir() else []:
        owner = re.fullmatch(r".*-t(\d+)-\d+", cluster)
        if owner and not Path("/proc", owner[1]).exists():
            _program("down", cluster)
