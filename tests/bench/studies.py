"""The studies' tables on lab twins of their clusters: every row that paced hosts can stand in for, beside published.

    .venv/bin/python tests/bench/studies.py [DATA_DIR] [STUDY...]

mixed_clusters goes over the twins of inventory/*.yaml one after the other and ends in one table. bottlenecks and input
train the real LeNet on the real MNIST in DATA_DIR (default ../shared/data/mnist) on two hosts at 2.5 Gbps. The paces
are assumed. Needs root.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rack import ROOT, Person, lab, show_machine

PACES = {"RTX 3090": 900, "RTX A2000": 333, "Tesla V100-16GB": 833, "A16": 220}
"""Samples of ResNet-152 at 32 x 32 a second and GPU."""
CLUSTERS = ("3090x2", "a2000_a2000", "a2000_v100", "a16_v100", "a16_a16_a2000")
DEFAULTS = {"device": "cpu", "bandwidth": "2.5Gbps", "env": {"OMP_NUM_THREADS": "1"}}
PAIR = {"cluster": "pair", "defaults": DEFAULTS, "nodes": [{"name": "one", "host": "10.77.6.1"},
                                                            {"name": "two", "host": "10.77.6.2"}]}  # fmt: skip


def main() -> None:
    data = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT.parent / "shared" / "data" / "mnist").resolve()
    wanted = sys.argv[2:] or ["mixed_clusters", "bottlenecks", "input"]
    show_machine()
    with tempfile.TemporaryDirectory() as folder:
        for study in wanted:
            clusters = [twin(name) for name in CLUSTERS] if study == "mixed_clusters" else [PAIR]
            for cluster in clusters:
                table = run_study(cluster, study, None if study == "mixed_clusters" else data, Path(folder))
            print(f"\n{table}", flush=True)


def twin(name: str) -> dict[str, Any]:
    """The cluster of this file as hosts that keep their GPUs' paces."""
    inventory = yaml.safe_load((ROOT / "inventory" / f"{name}.yaml").read_text())
    nodes = [
        {"name": node["name"], "host": node["host"], "gpu": node["gpu"], "gpus": node["gpus"],
         "paced": {"samples_per_s": PACES[node["gpu"]]}} for node in inventory["nodes"]
    ]  # fmt: skip
    return {"cluster": inventory["cluster"], "defaults": DEFAULTS, "nodes": nodes}


def run_study(cluster: dict[str, Any], study: str, data: Path | None, folder: Path) -> str:
    """Runs what this cluster can, and gives the table with all rows so far. data: brought to its hosts before."""
    with lab(yaml.safe_dump(cluster)) as hosts:
        person = Person(hosts, folder / "home", folder)
        person.types("up", str(hosts.inventory))
        if data:
            person.types("data", "push", str(data))
        done = person.types("study", study, "--out", str(folder / "runs"), timeout_s=3000)
        return done.stdout


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
