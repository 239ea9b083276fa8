"""What the README shows runs as it stands there."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import forks
import pytest

ROOT = Path(__file__).resolve().parents[1]
ORCH = [sys.executable, "-m", "orchestrator.cli"]
INVENTORY = """
cluster: readme
defaults: {transport: local, device: cpu, python: PYTHON, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: one, host: localhost, port: 1001, workdir: WORK/one}
  - {name: two, host: localhost, port: 1002, workdir: WORK/two}
"""


@pytest.mark.timeout(240)
def test_the_script_of_the_readme_takes_part_in_the_comparison(tmp_path):
    (script,) = re.findall(r"```python\n(# train\.py\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text(script)
    inventory = INVENTORY.replace("WORK", str(tmp_path)).replace("PYTHON", sys.executable)
    (tmp_path / "readme.yaml").write_text(inventory)

    def orch(*words: str) -> str:
        environment = {**os.environ, "ORCH_HOME": str(tmp_path / "home")}
        done = forks.run(forks.ORCH, words, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    orch("up", "readme.yaml")
    orch("run", "--batch", "97", "--", "mine/train.py")  # odd: the two ranks' shares differ
    summary = json.loads(orch("collect", "--job", "latest", "--json"))
    assert summary["state"] == "succeeded"
    assert summary["world_size"] == 2
    assert summary["samples_total"] == 97 * 50
    assert {node["name"]: node["samples_per_s"] > 0 for node in summary["nodes"]} == {"one": True, "two": True}
    assert summary["loss"] < 60, "the loss of a model that says nothing is the variance of the sum, 64"
