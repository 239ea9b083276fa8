"""What less faithful sums save and cost: bytes of a step on the wire, and MNIST's test accuracy.

    .venv/bin/python tests/bench/fidelity.py bytes
    .venv/bin/python tests/bench/fidelity.py accuracy DATA_DIR [EPOCHS] [--network small_resnet] [--seeds 5]
                                             [--lr 0.1 --schedule cosine] [--rows "exact; late"]

bytes: of ResNet-152 between two hosts, by the counters of one host's interface, headers, acknowledgements and logs
included: what a long run has sent less what a short one has, so that the start does not count. BatchNorm's statistics
travel once an evaluation, not in a step. Needs root. accuracy: two ranks, in every run the same samples in the same
order; shares of 5 to 2, or two stages (`pipeline`, of as many micro-batches as by default, and `late`, of one).
`parts` makes updates of 16 samples where the others make one of a rank's whole part of 64, with a learning rate that is
as much smaller (Goyal et al. 2017). Each row: the mean, the lowest and highest, and the median of each seed's
difference from exact.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rack import ROOT, Rack, rack, show_machine

ROWS: dict[str, dict[str, Any]] = {
    "exact": {},
    "half": {"fidelity": "half"},
    "compressed": {"fidelity": "compressed"},
    "local": {"fidelity": "local"},
    "local, bf16": {"fidelity": "local", "wire": "bf16"},
    "local, parts": {"fidelity": "local", "local_batch": 16, "lr": 0.005},
    "pipeline": {"strategy": "pipeline"},
    "late": {"strategy": "pipeline", "fidelity": "late"},
}
FEW, MANY = 4, 36
"""Updates of the two runs: 32 lie between them, one of local's rounds."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["bytes", "accuracy"])
    parser.add_argument("data_dir", nargs="?", default="data")
    parser.add_argument("epochs", type=int, nargs="?", default=3)
    parser.add_argument("--network", choices=["lenet", "small_resnet"], default="lenet")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--schedule", choices=["constant", "cosine"], default="constant")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", default="; ".join(ROWS), help="divided by ;")
    words = parser.parse_args()
    show_machine()
    if words.what == "bytes":
        show_bytes()
    else:
        show_accuracy(words)


def show_bytes() -> None:
    with rack(ROOT / "inventory" / "lab_a2000_v100.yaml") as lab:
        exact = 0.0
        for name, settings in ROWS.items():
            if "strategy" in settings:
                continue  # a pipeline sends activations
            few, many = FEW, FEW + (MANY - FEW if name.startswith("local") else 8)
            sent = (sent_by(lab, many, settings) - sent_by(lab, few, settings)) / (many - few)
            exact = exact or sent
            print(f"{name:12} {sent / 1e6:8.2f} MB a step sent by a host, {exact / sent:6.1f} times fewer", flush=True)


def sent_by(lab: Rack, steps: int, settings: dict[str, Any]) -> int:
    """Bytes that the V100's host has sent in a run of so many updates."""
    more = {"compress_after": 0} if settings.get("fidelity") == "compressed" else {}
    before = counter(lab)
    lab.run("resnet152_cifar", strategy="ddp", batch=256, steps=steps, shares="a2000=2,v100=5", **settings, **more)
    return counter(lab) - before


def counter(lab: Rack) -> int:
    links = json.loads(lab.lab.host_exec("v100", ["ip", "-json", "-statistics", "link"]).stdout)
    return sum(link["stats64"]["tx"]["bytes"] for link in links if link["ifname"] != "lo")


def show_accuracy(words: argparse.Namespace) -> None:
    rows = [row.strip() for row in words.rows.split(";")]
    found: dict[str, list[float]] = {name: [] for name in rows}
    for seed in range(words.seeds):  # the rows in turn
        for name in rows:
            found[name].append(trained(words, seed, ROWS[name]))
            print(f"  seed {seed} {name:12} {100 * found[name][-1]:.2f} %", flush=True)
    exact = found[rows[0]]
    for name, values in found.items():
        mean = statistics.mean(values)
        apart = statistics.median(one - other for one, other in zip(values, exact, strict=True))
        print(f"{name:12} {100 * mean:.2f} % ({100 * min(values):.2f} to {100 * max(values):.2f}), "
              f"median {100 * apart:+.2f} points of {rows[0]}, {words.epochs} epochs", flush=True)  # fmt: skip


def trained(words: argparse.Namespace, seed: int, settings: dict[str, Any]) -> float:
    asked = {"exp": "mnist_lenet", "model": words.network, "data_dir": words.data_dir, "seed": seed}
    asked |= {"epochs": words.epochs, "eval_every": words.epochs}
    asked |= {"lr": words.lr, "lr_schedule": words.schedule, "lr_warmup": 0.0}
    if "strategy" not in settings:
        asked["shares"] = f"{os.uname().nodename}:0=5,{os.uname().nodename}:1=2"
    asked |= {"device": "cpu", **settings}
    said = [f"--{key}={value}" for key, value in asked.items()]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "trainer", "--spawn", "2", *said],
            cwd=ROOT,
            env={**os.environ, "ORCH_METRICS": f"{folder}/{{rank}}.jsonl", "OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        lines = [json.loads(line) for line in Path(folder, "0.jsonl").read_text().splitlines()]
    return next(line["accuracy"] for line in reversed(lines) if line["event"] == "eval")


if __name__ == "__main__":
    main()
