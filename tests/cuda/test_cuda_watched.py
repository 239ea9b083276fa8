"""A script on a GPU that is only watched: its steps have the GPU's own times; nobody waits for these or for a loss."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import remote
from orchestrator.remote.layout import JobFolder
from orchestrator.remote.rank import watched
from tests.cuda.build import CannotBuild
from tests.cuda.environment import environment
from tests.support.watching import events_in

GEMM_MS = 4.0
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 16)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
from trainer.integrations.records import Records
records, waits = Records(), []
records.begin(0, None, counts_samples=False)
torch.cuda.Event.synchronize = torch.cuda.Stream.synchronize = torch.cuda.synchronize = lambda *_: waits.append(_)
for (x,) in DataLoader(TensorDataset(torch.randn(160, 64)), 16):
    optimizer.zero_grad()
    loss = model(x.cuda(non_blocking=True)).square().mean()
    loss.backward()
    optimizer.step()
    records.tell(loss=loss)
weights = [weight.tolist() for weight in model.parameters()]
print(len(waits))
"""


def test_the_times_are_the_gpus_own(tmp_path):
    try:
        on_stand_in = environment(1, {"FAKE_CLOCK": "virtual", "FAKE_GEMM_US": int(1000 * GEMM_MS)})
    except CannotBuild as error:
        pytest.skip(f"no stand-in for CUDA: {error}")
    job = JobFolder(tmp_path / "job")
    job.bin.mkdir(parents=True)
    (job.bin / "orch_remote").symlink_to(Path(remote.__file__).parent)
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables = {**plain, **on_stand_in, "ORCH_METRICS": str(tmp_path / "metrics.jsonl")}
    variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    variables |= watched(job, variables)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    start, first, *steps, end = events_in(tmp_path)
    assert (start["device"], start["samples_from"], end["status"]) == ("cuda:0", "loader", "succeeded")
    assert all("loss" in step for step in (first, *steps))
    assert "t_ms" not in first  # nobody had marked where it began on the GPU
    assert len(steps) >= 1
    for step in steps:  # two layers: two products forward, three backward
        assert step["compute_ms"] == pytest.approx(5 * GEMM_MS, rel=0.05)
        assert step["compute_ms"] <= step["t_ms"]
    walls = [step["wall"] for step in (first, *steps)]
    assert walls == sorted(set(walls))
