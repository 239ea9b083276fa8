"""Unequal hosts on a slow link: what each way to synchronise makes of them, and what binds.

    .venv/bin/python tests/bench/heterogeneous.py [BLOCKS]

Paced twins with ResNet-152's real gradient (232.7 MB), the global batch split equally. In each block every host runs
alone once and every strategy once, in turn; medians over the blocks, spread beside them. `of the sum` is the cluster's
speed over the sum of what its hosts did alone in the same run of this benchmark. Run ruler.py first. Needs root.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import yaml
from rack import ROOT, Measured, Rack, rack, show_machine, spread

STRATEGIES = ("allreduce", "ddp")
STEPS, WARMUP = 15, 3
FOUR_AT_1_GBPS = """
cluster: four
defaults: {device: cpu, bandwidth: 1Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: a2000, host: 10.77.5.1, gpu: RTX A2000, paced: {samples_per_s: 333}}
  - {name: v100, host: 10.77.5.2, gpu: Tesla V100-16GB, paced: {samples_per_s: 833}}
  - {name: a16, host: 10.77.5.3, gpu: A16, paced: {samples_per_s: 220}}
  - {name: a2000b, host: 10.77.5.4, gpu: RTX A2000, paced: {samples_per_s: 333}}
"""
PARTS = ("load_ms", "compute_ms", "sync_ms", "wait_ms", "optim_ms")


def main() -> None:
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    show_machine()
    for name, inventory in {"a2000 + v100, 2.5 Gbps": ROOT / "inventory" / "lab_a2000_v100.yaml",
                            "a2000 + v100 + a16 + a2000, 1 Gbps": FOUR_AT_1_GBPS}.items():  # fmt: skip
        print(f"\n{name}: global batch 256 in equal shares, {STEPS} steps a block, the first {WARMUP} left out")
        compare(inventory, blocks)


def compare(inventory: Path | str, blocks: int) -> None:
    text = inventory.read_text() if isinstance(inventory, Path) else inventory
    names = [node["name"] for node in yaml.safe_load(text)["nodes"]]
    alone: dict[str, list[float]] = {name: [] for name in names}
    together: dict[str, list[Measured]] = {strategy: [] for strategy in STRATEGIES}
    with rack(inventory) as lab:
        for _ in range(blocks):
            for name in names:
                alone[name].append(run(lab, [name], 256 // len(names), "none").samples_per_s)
            for strategy in STRATEGIES:
                together[strategy].append(run(lab, names, 256, strategy))
    for name, speeds in alone.items():
        print(f"  {name} alone, batch {256 // len(names)}: {spread(speeds)} samples/s")
    whole = sum(statistics.median(speeds) for speeds in alone.values())
    for strategy, runs in together.items():
        show(strategy, runs, whole)


def run(lab: Rack, nodes: list[str], batch: int, strategy: str) -> Measured:
    return lab.run("resnet152_cifar", nodes, strategy=strategy, batch=batch, steps=STEPS, warmup_steps=WARMUP)


def show(strategy: str, runs: list[Measured], whole: float) -> None:
    speeds = [run.samples_per_s for run in runs]
    valid = "" if all(run.valid for run in runs) else ", NOT VALID: the CPU was the limit"
    part = statistics.median(speeds) / whole
    print(f"  {strategy}: {spread(speeds)} samples/s, {part:.3f} of the sum of {whole:.0f}{valid}")
    for node in (node["name"] for node in runs[0].summary["nodes"]):
        parts = (f"{p[:-3]} {statistics.median(run.node(node)[p] for run in runs):.1f}" for p in PARTS)
        print(f"    {node:8} {'  '.join(parts)} ms")
    bound, straggler = runs[-1].summary["bound"], runs[-1].summary["straggler"]
    print(f"    binds: {bound['part']}, {bound['share']:.0%} of the step of {bound['node']}; the others wait for "
          f"{straggler['node'] + ': ' + straggler['reason'] if straggler else 'nobody'}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
