"""A script of one's own that takes part ends with its reason on standard error, in its records and as exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.trainer_ranks import ROOT, environment

BEGIN = """
import torch, trainer
from torch import nn
run = trainer.join(batch=4)
"""
LOOP = """
network, data = nn.Linear(2, 1), [(torch.ones(2), torch.ones(1)) for _ in range(8)]
run = run.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1), data)
for epoch in run.epochs():
    for inputs, targets in run.batches():
"""


def ended(folder: Path, script: str) -> tuple[int, str, dict[str, object]]:
    """Its exit code, what it said, and its last record."""
    env = environment(folder, PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
    return done.returncode, done.stderr, json.loads((folder / "0.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("script", "said", "message"),
    [
        (BEGIN + "1 / 0", "ZeroDivisionError: division by zero", "ZeroDivisionError: division by zero"),
        (BEGIN + LOOP + "        pass", "error: a batch's loss is missing", "a batch's loss is missing"),
    ],
    ids=["before its loop", "in its loop"],
)
def test_a_script_that_fails_says_why(tmp_path: Path, script: str, said: str, message: str) -> None:
    """Torch holds back what is printed by then, since it joined the ranks."""
    code, errors, last = ended(tmp_path, script)
    assert code == 1 and said in errors
    assert (last["event"], last["status"]) == ("end", "failed") and str(last["message"]).startswith(message)


def test_a_failure_at_the_very_end_is_one(tmp_path: Path) -> None:
    fails = """
from trainer.session import ending
def fail():
    raise trainer.TrainError("the other ranks have left")
ending.let_others_rest = fail
"""
    code, errors, _ = ended(tmp_path, BEGIN + fails)
    assert code == 1 and errors == "error: the other ranks have left\n"
