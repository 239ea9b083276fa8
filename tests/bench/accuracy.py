"""Seconds to an accuracy, by the clock, at the pace of a V100 and an A2000 that are not there: one row a way to train.

    .venv/bin/python tests/bench/accuracy.py DATA_DIR [--target 0.987] [--epochs 10] [--seeds 5] [--times 3]

LeNet learns MNIST for real (`paced: {like: mnist_lenet}`), in batches of 256, over a link that is as slow for its
gradients as 2.5 Gbps is for ResNet-152's: the exchange takes the same part of a step. Paces are those of
`inventory/lab_a2000_v100.yaml`, and everything, the link too, is faster by `--times`. The learning rate falls as a
cosine to the last epoch. Each host alone is a row, too; of the two `one process` would learn what they do. A row is
valid where no rank was later than its pace allows. Evaluations, after each epoch, count. Needs root.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from rack import Rack, end_orderly_on_term, rack, show_machine, spread

from orchestrator.forecast.layers import gradient_bytes, layers_of

RESNET_BYTES = gradient_bytes(layers_of("resnet152", (3, 32, 32), 10))
SENT_BYTES = 2 * gradient_bytes(layers_of("lenet", (1, 28, 28), 10))
"""The network that learns, and the one that it is like."""
PACES = {"v100": 833.0, "a2000": 333.0}
BATCH = 256
BY_SPEED = "v100=183,a2000=73"
ROWS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "v100 alone": (("v100",), {}),
    "a2000 alone": (("a2000",), {}),
    "ddp, equal shares": ((), {"shares": "equal"}),
    "ddp": ((), {"shares": BY_SPEED}),
    "half": ((), {"shares": BY_SPEED, "fidelity": "half"}),
    "compressed": ((), {"shares": BY_SPEED, "fidelity": "compressed"}),
    "local": ((), {"shares": BY_SPEED, "fidelity": "local", "local_steps": 8, "local_after": 0}),
}
"""Which hosts take part (none: all), and their settings."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--target", type=float, default=0.987)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--times", type=float, default=3.0, help="so many times as fast as the cards")
    parser.add_argument("--rows", default="; ".join(ROWS), help="divided by ;")
    asked = parser.parse_args()
    end_orderly_on_term()
    show_machine()
    link_bps = 2.5e9 * asked.times * SENT_BYTES / RESNET_BYTES
    print(
        f"paces and link times {asked.times:g}: {link_bps / 1e6:.1f} Mbps; target {100 * asked.target:g} %", flush=True
    )
    print(f"{'':18} {'seconds to it':>24} {'samples/s':>10} {'last accuracy':>24} {'reached':>8} {'valid':>6}")
    with rack(inventory(asked.times, link_bps)) as lab:
        for name in PACES:
            bring(lab, name, asked.data_dir / "MNIST" / "raw")
        for row in asked.rows.split("; "):
            print(line(row, [tried(lab, row, seed, asked) for seed in range(asked.seeds)]), flush=True)


def inventory(times: float, link_bps: float) -> str:
    hosts = "".join(
        f"  - {{name: {name}, host: 10.79.0.{number}, paced: {{samples_per_s: {times * speed}, like: mnist_lenet}}}}\n"
        for number, (name, speed) in enumerate(PACES.items(), start=1)
    )
    defaults = "user: lab, key_file: /run/orch-lab/id_ed25519, device: cpu, ranks: 1, env: {OMP_NUM_THREADS: '1'}"
    return f"cluster: accuracy\ndefaults: {{{defaults}, bandwidth: {link_bps / 1e6:.3f}Mbps}}\nnodes:\n{hosts}"


def bring(lab: Rack, node: str, raw: Path) -> None:
    """MNIST's files to where a run looks for them."""
    lab.lab.host_exec(node, ["mkdir", "-p", "data/MNIST/raw"], as_user=True, check=True)
    for file in raw.glob("*.gz"):
        with open(file, "rb") as content:
            target = f"data/MNIST/raw/{file.name}"
            lab.lab.host_exec(node, ["sh", "-c", f"cat >{target}"], as_user=True, stdin=content, check=True)


def tried(lab: Rack, row: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """The summary of one run."""
    nodes, settings = ROWS[row]
    common = {"batch": BATCH, "epochs": asked.epochs, "seed": seed}
    goal = {"target_accuracy": asked.target, "lr_schedule": "cosine", "lr": 0.05}
    return lab.run("mnist_lenet", nodes, **common, **goal, **settings).summary


def line(row: str, runs: list[dict[str, Any]]) -> str:
    reached = [run["target"]["reached"] for run in runs if run["target"] and run["target"]["reached"]]
    seconds = spread([one["total_s"] for one in reached], 1) if reached else "-"
    speed = statistics.median(run["samples_per_s"] for run in runs)
    accuracy = spread([100 * run["accuracy"] for run in runs], 2)
    valid = sum(all(node["valid"] for node in run["nodes"]) for run in runs)
    return f"{row:18} {seconds:>24} {speed:10.0f} {accuracy:>24} {len(reached)}/{len(runs):<6} {valid}/{len(runs)}"


if __name__ == "__main__":
    sys.exit(main())
