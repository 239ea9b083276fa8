"""Shares that follow the hosts' speeds: how soon after a host slows down, how quiet under noise, and what they cost.

    .venv/bin/python tests/bench/rebalance.py [--runs 3] [--pairs 40]

Two paced hosts on a lab's link, LeNet's small gradient. `recovers`: the faster host takes twice as long from one step
on; its best possible is the step that the solver finds for the new speeds. `noise`: 500 steps whose times vary by 5 %.
`costs`: what a step takes longer with metrics, and with rebalancing besides, which finds nothing to do; blocks take
turns in one gang, a pair is two neighbouring ones. A pace holds compute to its time, so that what comes on top stands
out, where the speed of a CPU that computes varies by more. Needs root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rack import Rack, rack, show_machine
from rows import WARMUP, Host, fastest, inventory, measure

from trainer.shared import Speed, fastest_shares

SLOW, FAST = 333.0, 833.0
AT_STEP, STEPS, BATCH = 40, 90, 256
WITHIN = 1.05
NOISY_STEPS, NOISY_BATCH, NOISE = 500, 64, 0.05
COST_STEPS, COST_BATCH = 18, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=40)
    asked = parser.parse_args()
    show_machine()
    recovers(asked.runs)
    noise()
    costs(asked.pairs)


def recovers(runs: int) -> None:
    slowdown = ({"at_step": AT_STEP, "factor": 2.0},)
    hosts = [Host("slow", 1, SLOW), Host("fast", 1, FAST, slowdown=slowdown)]
    then = [Speed(0, 1000 / SLOW), Speed(0, 2 * 1000 / FAST)]
    shares = fastest_shares(then, BATCH)
    best_ms = max(speed.step_ms(share) for speed, share in zip(then, shares, strict=True))
    with rack(inventory(hosts)) as lab:
        for _ in range(runs):
            steps, changes = run(lab, BATCH, STEPS)
            times_ms = [max(row["t_ms"] for row in rows) for rows in steps]
            after = times_ms[AT_STEP:]
            back = next((i for i in range(len(after)) if all(ms <= WITHIN * best_ms for ms in after[i : i + 10])), None)
            rest = statistics.median(after[10:])
            print(f"twice as slow from step {AT_STEP} on: back within 5 % of the best possible "
                  f"{1000 * BATCH / best_ms:.0f} samples/s after {back} steps; steps 10 to {len(after)} after it at "
                  f"{best_ms / rest:.3f} of it; steps then {', '.join(f'{ms:.0f}' for ms in after[:12])} ms; "
                  f"{changes}", flush=True)  # fmt: skip


def noise() -> None:
    hosts = [Host("slow", 1, SLOW, jitter=NOISE), Host("fast", 1, FAST, jitter=NOISE)]
    with rack(inventory(hosts)) as lab:
        _, changes = run(lab, NOISY_BATCH, NOISY_STEPS)
        print(f"{NOISY_STEPS} steps of batch {NOISY_BATCH} under {NOISE:.0%} noise: {changes}", flush=True)


def run(lab: Rack, batch: int, steps: int) -> tuple[list[list[dict[str, Any]]], str]:
    """Each step's rows, one a rank; and the changes of shares in words."""
    lab.person.types("run", "--exp", "mnist_lenet", "--set", f"batch={batch}", "--set", f"steps={steps}",
                     "--set", "shares=auto", "--set", "data=synthetic", timeout_s=600)  # fmt: skip
    summary, folder = lab.collect()
    of_ranks = []
    for file in sorted(folder.glob("nodes/*/rank-*/metrics.jsonl")):
        lines = map(json.loads, file.read_text().splitlines())
        of_ranks.append([line for line in lines if line["event"] == "step"])
    return [list(rows) for rows in zip(*of_ranks, strict=True)], words_of(summary["rebalances"])


def words_of(changes: Sequence[dict[str, Any]]) -> str:
    words = (f"step {one['step']} to {'/'.join(map(str, one['shares']))}" for one in changes)
    return f"{len(changes)} changes ({'; '.join(words)})"


def costs(pairs: int) -> None:
    hosts = [Host("slow", 1, SLOW), Host("fast", 1, FAST)]
    rows = {
        "nothing": {"metrics": False},
        "metrics": {},
        "metrics and rebalancing": {"shares": "auto", "speeds": speeds_of(hosts)},
    }
    known = {"strategy": "ddp", "shares": fastest(hosts, COST_BATCH)[1]}
    with rack(inventory(hosts)) as lab:
        found = measure(lab, {name: known | row for name, row in rows.items()}, exp="mnist_lenet",
                        batch=COST_BATCH, blocks=pairs, steps=COST_STEPS)  # fmt: skip
    bare = found.pop("nothing").blocks_s
    steps = COST_STEPS + WARMUP
    step_ms = 1000 * statistics.median(bare) / steps
    for name, row in found.items():
        ratios = [on / off - 1 for on, off in zip(row.blocks_s, bare, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name}: a step of {step_ms:.1f} ms takes {middle:+.3%} ({1000 * middle * step_ms:+.0f} us; median "
              f"of {pairs} pairs of {steps} steps, half of them {low:+.3%} to {high:+.3%})", flush=True)  # fmt: skip


def speeds_of(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:0=0+{1000 / host.samples_per_s}" for host in hosts if host.samples_per_s)


if __name__ == "__main__":
    sys.exit(main())
