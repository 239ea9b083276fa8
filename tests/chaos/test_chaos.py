"""Sixty faults of every kind there is, and no invariant broken."""

import subprocess
import sys
from pathlib import Path

import pytest
from lab import lab

ROOT = Path(__file__).resolve().parents[2]
SEED = 20261


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixty_faults_break_no_invariant(tmp_path):
    with lab("cluster: probe\nnodes: [{name: a, host: 10.79.0.1}]"):
        pass  # skipped where no lab can stand
    words = ["--faults", "60", "--seed", str(SEED), "--log", str(tmp_path / "events.jsonl")]
    run = subprocess.run([sys.executable, "-m", "tests.chaos", *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout[-8000:]}\n{run.stderr[-4000:]}"
    assert "60 faults" in run.stdout
