"""A person who types `orch` in a folder of their own, with a cluster of two hosts that are this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from orchestrator.controller import Controller
from orchestrator.hosts import allow, load_inventory, not_allowed
from tests.support import forks
from tests.support.quick_python import quick_python

INVENTORY = """
cluster: rack
defaults: {transport: local, device: cpu, python: PYTHON}
nodes:
  - {name: a, host: localhost, workdir: FOLDER/a}
  - {name: b, host: localhost, workdir: FOLDER/b}
"""
SCRIPT = "import os, sys\nprint('given', *sys.argv[1:], os.environ.get('LR'))\n"


def bring_up(controller: Controller, file: Path) -> None:
    """As `orch up --allow-local`."""
    inventory, home = load_inventory(file), controller.store.home
    allow(home, not_allowed(home, controller.clusters.nodes_of(inventory)))
    controller.clusters.up(inventory)


class Place:
    """python: the hosts' one; without torch if it is None."""

    def __init__(self, folder: Path, python: str | None = None) -> None:
        self.folder, self.here = folder, folder / "here"
        for path in ("proj/train.py", "proj/pack/__init__.py", "proj/pack/train.py"):
            (self.here / path).parent.mkdir(parents=True, exist_ok=True)
            (self.here / path).write_text(SCRIPT)
        (self.here / "my.env").write_text("LR=7\nB=8\n")
        python = python or quick_python(folder / "quick")
        (folder / "rack.yaml").write_text(INVENTORY.replace("PYTHON", python).replace("FOLDER", str(folder)))
        self.types("up", str(folder / "rack.yaml"), "--allow-local")

    def types(self, *words: str, code: int = 0, cwd: str = ".") -> Any:
        env = {**os.environ, "ORCH_HOME": str(self.folder / "home"), "COLUMNS": "400", "HF_TOKEN": "hf_secret"}
        done = forks.run(forks.ORCH, words, env=env, cwd=self.here / cwd)
        assert done.returncode == code, f"{words} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done

    def plan(self, *words: str, cwd: str = ".") -> dict[str, Any]:
        """Without the values that differ from start to start, and paths as they were typed."""
        found = json.loads(self.types("run", "--dry-run", "--json", *words, cwd=cwd).stdout)
        shown: dict[str, Any] = json.loads(json.dumps(found).replace(found["job"], "JOB"))
        return {key: value for key, value in shown.items() if key not in ("created", "asked")}
