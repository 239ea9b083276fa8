"""A fault of every kind there is, and no invariant broken; `make chaos` plays more of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from lab import lab

from .faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
SEED = "29"  # one that begins with the kinds that take longest
CELLS = "8"


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fault_of_every_kind_breaks_no_invariant(tmp_path):
    with lab("cluster: probe\nnodes: [{name: a, host: 10.79.0.1}]"):
        pass  # skipped where no lab can stand
    words = ["--faults", str(len(FAULTS)), "--seed", SEED, "--cells", CELLS, "--log", str(tmp_path / "events.jsonl")]
    run = subprocess.run([sys.executable, "-m", "tests.chaos", *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout[-8000:]}\n{run.stderr[-4000:]}"
    assert f"{len(FAULTS)} faults of {len(FAULTS)} kinds, 0 broken" in run.stdout
