"""A loss that is NaN or infinite: reported once for each rank, and never the end of a good checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.trainer_ranks import ROOT, environment, of_event, records
from trainer.checkpoints import name_of
from trainer.shared import NOT_FINITE

SCRIPT = """
import math, sys
import torch, trainer
from torch import nn

network, data = nn.Linear(2, 1), [(torch.ones(2), torch.ones(1)) for _ in range(8)]
run = trainer.join(batch=4, epochs=3, checkpoint_every=1, checkpoint_dir=sys.argv[1]).prepare(
    network, torch.optim.SGD(network.parameters(), lr=0.01), data)
for epoch in run.epochs():
    for inputs, targets in run.batches():
        loss = nn.functional.mse_loss(run.model(inputs), targets, reduction="sum")
        run.step(loss * math.nan if sys.argv[2] == "loss" and epoch == 1 else loss)
    run.evaluate(lambda outputs, targets: {"loss": math.inf if sys.argv[2] == "test" else 0.0}, data)
"""


def trained(folder: Path, where: str) -> subprocess.CompletedProcess[str]:
    env = environment(folder, PYTHONPATH=str(ROOT), ORCH_NODE="node0")
    command = [sys.executable, "-c", SCRIPT, str(folder / "checkpoints"), where]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=True)


def mark(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / f"0.jsonl{NOT_FINITE}").read_text()))


def test_it_is_reported_once_and_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    done = trained(tmp_path, "loss")
    assert done.stdout.count("warning: ") == 1
    assert "warning: loss is nan in update 3 (epoch 2), rank 0 on node0; the run goes on" in done.stdout
    assert mark(tmp_path) == {"step": 2, "epoch": 1, "loss": "nan", "of": "loss"}
    written = [(line["step"], line["failure"] is None) for line in of_event(records(tmp_path, 0), "checkpoint")]
    assert written == [(0, True), (1, True), (2, False), (3, False), (4, False), (5, False)]
    assert "weight holds NaN or infinity; the last finite one is kept" in done.stderr
    assert max(path.name for path in (tmp_path / "checkpoints").glob("*.pt")) == name_of(2)


def test_a_test_loss_that_is_infinite_is_reported(tmp_path: Path) -> None:
    assert "test loss is inf in update 2 (epoch 1), rank 0 on node0" in trained(tmp_path, "test").stdout
    assert mark(tmp_path) == {"step": 1, "epoch": 0, "loss": "inf", "of": "test loss"}
    (tmp_path / "checkpoints").rename(tmp_path / "old")
    trained(tmp_path, "none")
    assert not (tmp_path / f"0.jsonl{NOT_FINITE}").exists()
