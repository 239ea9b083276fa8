"""What checkpoints cost the steps, and their copies on a second host, over a link that the gradients need too.

    .venv/bin/python tests/bench/checkpoint_copies.py [--steps 60] [--every 10] [--rounds 3] [--width 4096]

Two hosts of the lab at 2.5 Gbps train for real, by `ddp`: a network of one wide layer, `--width` outputs of 3,072
inputs. What a GPU would compute they spend asleep, so that the machine's cores are left for the exchange and the copy.
The rows take turns. A step's time is that from the first step's end to the last one's, over the steps between them; a
checkpoint costs what the steps of its turn are longer than without any. A copy's own time is how long it was on its
way, beside the steps. Needs root.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rack import Rack, rack, show_machine, spread

INVENTORY = """
cluster: copies
defaults: {user: lab, key_file: /run/orch-lab/id_ed25519, device: cpu, ranks: 1, bandwidth: 2.5Gbps}
nodes:
  - {name: one, host: 10.78.0.1, env: {OMP_NUM_THREADS: "1"}}
  - {name: two, host: 10.78.0.2, env: {OMP_NUM_THREADS: "1"}}
"""
SCRIPT = """
import os, sys, time
import torch
import trainer
from torch import nn
from torch.nn.functional import cross_entropy

width, copied = int(sys.argv[1]), sys.argv[2] == "copied"
if not copied:
    os.environ.pop("ORCH_CHECKPOINT_COPY", None)


class Images:
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.zeros(3072), index % 10


model = nn.Sequential(nn.Linear(3072, width), nn.ReLU(), nn.Linear(width, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
run = trainer.join(batch=8).prepare(model, optimizer, Images())
for epoch in run.epochs():
    for inputs, targets in run.batches():
        time.sleep(0.1)
        run.step(cross_entropy(run.model(inputs), targets, reduction="sum"))
"""
ROWS = {"no checkpoints": (False, "alone"), "checkpoints": (True, "alone"), "and copies": (True, "copied")}


def main() -> None:
    parser = argparse.ArgumentParser()
    for option, default in (("--steps", 60), ("--every", 10), ("--rounds", 3), ("--width", 4096)):
        parser.add_argument(option, type=int, default=default)
    asked = parser.parse_args()
    show_machine()
    step_ms, copy_ms = {name: list[float]() for name in ROWS}, list[float]()
    with rack(INVENTORY) as lab:
        Path(lab.person.folder, "mine").mkdir()
        Path(lab.person.folder, "mine", "train.py").write_text(SCRIPT)
        for _ in range(asked.rounds):
            for name, (writes, copied) in ROWS.items():
                every = asked.every if writes else 0
                found, copies = tried(lab, asked.steps, every, [str(asked.width), copied])
                step_ms[name].append(found)
                copy_ms += copies
    size_mb = 2 * 4 * (3072 + 11) * asked.width / 1e6
    print(
        f"checkpoints of {size_mb:.0f} MB, one in {asked.every} steps; {asked.rounds} times {asked.steps} steps a row"
    )
    for name, found in step_ms.items():
        print(line(name, found, step_ms["no checkpoints"], asked.every))
    print(
        f"a copy was on its way for {spread(copy_ms)} ms; its bytes alone take {size_mb * 8 / 2.5:.0f} ms at 2.5 Gbps"
    )


def line(name: str, step_ms: Sequence[float], without_ms: Sequence[float], every: int) -> str:
    """without_ms: those of the same rounds without checkpoints."""
    ratio = statistics.median(step_ms) / statistics.median(without_ms)
    costs_ms = [every * (one - other) for one, other in zip(step_ms, without_ms, strict=True)]
    costs = f"; a checkpoint costs {spread(costs_ms)} ms" if any(costs_ms) else ""
    return f"  {name:15} {spread(step_ms, 1)} ms a step, {ratio:.3f}{costs}"


def tried(lab: Rack, steps: int, every: int, words: list[str]) -> tuple[float, list[float]]:
    """Milliseconds of a step, and those of each copy."""
    settings = [word for pair in (f"steps={steps}", f"checkpoint_every={every}") for word in ("--set", pair)]
    lab.person.types("run", *settings, "--", "mine/train.py", *words, timeout_s=600)
    _, folder = lab.collect()
    events = {path: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("**/*.jsonl")}
    (walls,) = (
        [each["wall"] for each in of if each["event"] == "step"] for path, of in events.items() if "one" in path.parts
    )
    copies = [each["copy_ms"] for of in events.values() for each in of if each["event"] == "copy"]
    assert len(copies) == (steps // every if words[-1] == "copied" else 0), (len(copies), words)
    return 1000 * (max(walls) - min(walls)) / (len(walls) - 1), copies


if __name__ == "__main__":
    main()
