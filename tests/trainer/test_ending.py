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
    env = environment(folder, PYTHONPATH=str(ROOT), ORCH_NODE="node0")
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


EPOCHS = BEGIN.replace("batch=4", "batch=4, epochs=3") + LOOP
STEP = """        run.step(nn.functional.mse_loss(run.model(inputs), targets, reduction="sum"))
"""
LEAVES = {
    "break": "    if epoch == 1: break",
    "sys.exit(0)": "    if epoch == 1: import sys; sys.exit(0)",
    "raise SystemExit": "    if epoch == 1: raise SystemExit",
    "its own exit code": "    if epoch == 1: import sys; sys.exit(3)",
    "an interrupt that it caught": """
    if epoch == 1:
        import os, signal
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            break
""",
}


@pytest.mark.parametrize("way", LEAVES)
def test_a_script_that_leaves_its_loop_early_fails(tmp_path: Path, way: str) -> None:
    code, errors, last = ended(tmp_path, EPOCHS + STEP + LEAVES[way])
    assert code == {"its own exit code": 3, "an interrupt that it caught": 130}.get(way, 1), errors
    assert "after update 4 of 6" in errors and errors.startswith(("error: the script ended", "interrupted by SIGINT"))
    assert last["status"] == ("interrupted" if code == 130 else "failed")


def test_a_run_that_stops_early_on_every_rank_succeeds(tmp_path: Path) -> None:
    code, errors, last = ended(tmp_path, EPOCHS + STEP + LEAVES["break"] + "\nrun.end()\nrun.end()")
    assert (code, errors, last["status"]) == (0, "", "succeeded")


@pytest.mark.parametrize("then", ["", "    run.evaluate(lambda outputs, targets: {}, data)"], ids=["go on", "evaluate"])
def test_an_epoch_that_was_left_is_not_gone_on_from(tmp_path: Path, then: str) -> None:
    """Other ranks still train: this one would wait for them in another exchange, and they for it."""
    code, errors, last = ended(tmp_path, EPOCHS + STEP + "        break\n" + then)
    assert code == 1 and "left run.batches() before its end (rank 0 on node0, after update 0 of 6)" in errors
    assert last["status"] == "failed"


def test_a_failure_at_the_very_end_is_one(tmp_path: Path) -> None:
    fails = """
from trainer.session import ending
def fail():
    raise trainer.TrainError("the other ranks have left")
ending.let_others_rest = fail
"""
    code, errors, _ = ended(tmp_path, EPOCHS + STEP + fails)
    assert code == 1 and errors == "error: the other ranks have left\n"
