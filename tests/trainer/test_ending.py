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
from trainer.session import session as ending
def fail():
    raise trainer.TrainError("the other ranks have left")
ending.wait_for_threads = fail
"""
    code, errors, _ = ended(tmp_path, EPOCHS + STEP + fails)
    assert code == 1 and errors == "error: the other ranks have left\n"


WORKERS = """
import multiprocessing, sys, torch, trainer
from torch import nn
START
class Data:
    epoch = -1
    def __len__(self):
        return 8
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __getitem__(self, index):
        return torch.full((2,), float(self.epoch)), torch.ones(1)
run, network, data = trainer.join(batch=4, epochs=3, num_workers=1, device="cpu"), nn.Linear(2, 1), Data()
run = run.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1), data)
seen = []
for epoch in run.epochs():
    data.set_epoch(epoch)
    for inputs, targets in run.batches():
        seen.append(int(inputs[0, 0]))
        run.step((run.model(inputs) - targets).square().sum())
print("seen", seen)
"""
OF_PYTHON_3_14 = """
context = multiprocessing.context
multiprocessing._default_context = context._default_context
context._default_context._default_context = context._concrete_contexts["forkserver"]
"""


def run_file(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """As a file, which a process that begins anew can run once more."""
    (folder / "script.py").write_text(script)
    env = environment(folder, PYTHONPATH=str(ROOT))
    words = [sys.executable, str(folder / "script.py")]
    return subprocess.run(words, capture_output=True, text=True, env=env, check=False, timeout=100)


@pytest.mark.parametrize("start", ["", OF_PYTHON_3_14], ids=["as it is", "forkserver by default"])
def test_processes_that_load_know_the_epoch_and_run_no_script(tmp_path: Path, start: str) -> None:
    done = run_file(tmp_path, WORKERS.replace("START", start))
    assert done.returncode == 0, done.stderr
    assert "seen [0, 0, 1, 1, 2, 2]" in done.stdout


def test_a_script_that_a_loading_process_runs_again_says_so(tmp_path: Path) -> None:
    done = run_file(tmp_path, WORKERS.replace("START", 'multiprocessing.set_start_method("forkserver", force=True)'))
    assert done.returncode == 1
    assert "error: a process that loads samples has run the script again" in done.stderr


COMPILED = """
import sys, torch, trainer
from torch import nn
torch.manual_seed(0)
network, data = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), [(torch.ones(2), torch.ones(1)) for _ in range(8)]
HOW
run = trainer.join(batch=4, epochs=2, steps=STEPS, device="cpu", checkpoint_every=2, checkpoint_dir="FOLDER", RESUME)
run = run.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9), data)
for epoch in run.epochs():
    for inputs, targets in run.batches():
        run.step((run.model(inputs) - targets).square().sum())
print("weights", [weight.tolist() for weight in network.parameters()])
"""
WHOLE = 'network = torch.compile(network, backend="eager")'
PART = 'network[0] = torch.compile(network[0], backend="eager")'


def trained_in_halves(folder: Path, first: str, then: str, ema: str = "") -> str:
    """What it ends with."""
    script = COMPILED.replace("FOLDER", str(folder / "kept"))
    resume = f'resume="{folder / "kept"}"'
    for how, steps, more in ((first, "2", ema), (then, "4", ", ".join(filter(None, [ema, resume])))):
        done = run_file(folder, script.replace("HOW", how).replace("STEPS", steps).replace("RESUME", more))
        assert done.returncode == 0, done.stderr
    return done.stdout.split("weights")[1].splitlines()[0]


@pytest.mark.timeout(240)
def test_a_checkpoint_of_a_compiled_network_is_one_of_the_network(tmp_path: Path) -> None:
    ends = []
    for number, (first, then, ema) in enumerate([("", "", ""), (WHOLE, "", "ema=0.9"), ("", PART, "ema=0.9")]):
        (folder := tmp_path / str(number)).mkdir()
        ends.append(trained_in_halves(folder, first, then, ema))
    assert len(set(ends)) == 1
