"""A script of one's own on two unequal hosts: what its profile predicts beside what it does, one row a way to run it.

    .venv/bin/python tests/bench/script.py [--steps 24] [--profile-s 15] [--rows "ddp; local"] [--computes]

Two hosts of the lab at 2.5 Gbps train for real: gradients, sums and weights are what they are. What a layer takes on
its host it spends asleep, as the host of a GPU does while that computes; the second host takes twice as long. With
--computes the hosts' processors work instead, the second one through each layer twice: then two ranks, what Gloo does
for each of them, two hosts' networks and the controller share this machine's cores, which the profile of a host alone
does not see. `orch profile` measures the script on each host alone, `orch run --dry-run` says what it predicts of a
row, and the row is run. Speeds alone are those of the profile. Needs root.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rack import Rack, rack, show_machine

BATCH = 96
ROWS: dict[str, dict[str, Any]] = {
    "ddp, equal shares": {"shares": "equal"},
    "ddp": {},
    "half": {"fidelity": "half"},
    "local": {"fidelity": "local", "local_steps": 8, "local_after": 0},
    "pipeline": {"strategy": "pipeline"},
    "auto": {"strategy": "auto"},
}
INVENTORY = """
cluster: script
defaults: {user: lab, key_file: /run/orch-lab/id_ed25519, device: cpu, ranks: 1, bandwidth: 2.5Gbps}
nodes:
  - {name: fast, host: 10.78.0.1, env: {OMP_NUM_THREADS: "1", PASSES: "1"}}
  - {name: slow, host: 10.78.0.2, env: {OMP_NUM_THREADS: "1", PASSES: "2"}}
"""
SCRIPT = """
import os, sys, time
import torch
import trainer
from torch import nn
from torch.nn.functional import cross_entropy

PASSES = int(os.environ.get("PASSES", "1"))
COMPUTES = "--computes" in sys.argv


class Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, sample_ms):
        ctx.seconds = len(outputs) * sample_ms / 1000
        time.sleep(ctx.seconds)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Slowed(nn.Module):
    def __init__(self, layer, sample_ms):
        super().__init__()
        self.layer, self.sample_ms = layer, sample_ms

    def forward(self, inputs):
        if COMPUTES:
            return sum(self.layer(inputs) for _ in range(PASSES)) / PASSES
        return Asleep.apply(self.layer(inputs), PASSES * self.sample_ms)


class Images:
    def __init__(self):
        self.images = torch.randn(512, 3, 32, 32, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return self.images[index % 512], index % 10


def convolution(inputs, outputs, sample_ms):
    return [Slowed(nn.Conv2d(inputs, outputs, 3, padding=1), sample_ms), nn.ReLU(), nn.MaxPool2d(2)]


widths = (64, 128, 128, 256) if COMPUTES else (8, 16, 32, 256)
layers, inputs = [], 3
for outputs, sample_ms in zip(widths, (0.3, 0.6, 0.4, 0.3)):
    layers, inputs = [*layers, *convolution(inputs, outputs, sample_ms)], outputs
layers += [nn.Flatten(), Slowed(nn.Linear(1024, 1024), 0.2), nn.ReLU(), Slowed(nn.Linear(1024, 10), 0.05)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
run = trainer.join(batch=BATCH).prepare(model, optimizer, Images())
for epoch in run.epochs():
    for inputs, targets in run.batches():
        run.step(cross_entropy(run.model(inputs), targets, reduction="sum"))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--profile-s", type=float, default=15.0, help="for each host")
    parser.add_argument("--rows", default="; ".join(ROWS), help="divided by ;")
    parser.add_argument("--computes", action="store_true", help="the hosts' processors work")
    asked = parser.parse_args()
    script = ["--", "mine/train.py", *(["--computes"] if asked.computes else [])]
    show_machine()
    with rack(INVENTORY) as lab:
        Path(lab.person.folder, "mine").mkdir()
        Path(lab.person.folder, "mine", "train.py").write_text(SCRIPT.replace("BATCH", str(BATCH)))
        profile = lab.person.asks("profile", "--each", "--set", f"profile_s={asked.profile_s}", *script)
        alone = {rank["node"]: rank["samples_per_s"] for rank in profile["ranks"]}
        print("alone, by profile: " + ", ".join(f"{name} {speed:.1f}" for name, speed in alone.items()) + " samples/s")
        print(f"{'':20} {'predicted':>10} {'measured':>10} {'error':>7} {'of sum':>7}")
        for row in asked.rows.split("; "):
            predicted, measured = tried(lab, script, {**ROWS[row], "steps": asked.steps})
            error = f"{100 * (predicted / measured - 1):+.1f} %" if predicted else "-"
            print(
                f"{row:20} {predicted or 0:10.1f} {measured:10.1f} {error:>7} {measured / sum(alone.values()):7.2f}",
                flush=True,
            )


def tried(lab: Rack, script: Sequence[str], settings: dict[str, Any]) -> tuple[float | None, float]:
    """samples/s, as predicted and as measured."""
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    plan = lab.person.asks("run", "--dry-run", *words, "--nodes", "fast,slow", *script)
    lab.person.types("run", *words, "--nodes", "fast,slow", *script, timeout_s=600)
    summary, _ = lab.collect()
    return plan["prediction"] and plan["prediction"]["samples_per_s"], summary["samples_per_s"]


if __name__ == "__main__":
    main()
