"""Runs of the same thing, compared two by two: how often `orch compare` finds a difference where there is none.

    .venv/bin/python tests/bench/compare.py [--pairs 20] [--steps 150] [--real | --ways]

Each run is compared with the one before it, on a lab pair at 2.5 Gbps that stands in for GPUs. --real: LeNet on this
machine's CPU, whose speed changes from one run to the next with whatever else it does. The last line counts; it exits
with 1 where more than a tenth of the pairs differ. One run more, at nine tenths of the pace, has to differ. --ways:
ResNet-152 on the lab's V100 alone, over it and an A2000 by ddp, and as a pipeline, side by side. Needs root.
"""

from __future__ import annotations

import argparse
import itertools
import sys

from rack import ROOT, Rack, rack, show_machine

PACES = {"v100": 833.0, "a2000": 333.0}
ALLOWED = 0.1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--ways", action="store_true")
    asked = parser.parse_args()
    show_machine()
    if asked.ways:
        return compare_ways(asked.steps)
    with rack(inventory(1.0, paced=not asked.real)) as lab:
        jobs = [one_run(lab, asked.steps) for _ in range(asked.pairs + 1)]
        differing = sum([differ(lab, *pair) for pair in itertools.pairwise(jobs)])
        print(f"{asked.pairs - differing} of {asked.pairs} pairs of the same thing show no difference", flush=True)
        if asked.real:
            return int(differing > ALLOWED * asked.pairs)
        lab.pace(inventory(0.9, paced=True))
        slower = differ(lab, jobs[0], one_run(lab, asked.steps))
        print(f"nine tenths of the pace {'differs' if slower else 'DOES NOT differ'}")
        return int(differing > ALLOWED * asked.pairs or not slower)


def compare_ways(steps: int) -> int:
    """Exits with 1 where a run is not valid."""
    print("paced, and assumed: 833 (V100) and 333 samples/s (A2000); the hardware catalogue says 3,869 and 1,820")
    every = {"data": "synthetic", "batch": 256, "steps": steps, "samples": 256 * steps, "epochs": 1, "eval_every": 0}
    with rack(ROOT / "inventory" / "lab_a2000_v100.yaml") as lab:
        alone = lab.run("resnet152_cifar", ["v100"], strategy="none", **every)
        ddp = lab.run("resnet152_cifar", strategy="ddp", shares="equal", **every)
        piped = lab.run("resnet152_cifar", strategy="pipeline", accumulate=8, **every)
        runs = [alone, ddp, piped]
        print(lab.person.types("compare", *(run.summary["job"] for run in runs)).stdout)
    return int(not all(run.valid for run in runs))


def inventory(times: float, *, paced: bool) -> str:
    defaults = "user: lab, key_file: /run/orch-lab/id_ed25519, device: cpu, ranks: 1, env: {OMP_NUM_THREADS: '1'}"
    paces = {name: f", paced: {{samples_per_s: {times * pace}}}" if paced else "" for name, pace in PACES.items()}
    hosts = "".join(
        f"  - {{name: {name}, host: 10.79.1.{number}{pace}}}\n"
        for number, (name, pace) in enumerate(paces.items(), start=1)
    )
    return f"cluster: compare\ndefaults: {{{defaults}, bandwidth: 2.5Gbps}}\nnodes:\n{hosts}"


def one_run(lab: Rack, steps: int) -> str:
    """The job's id."""
    settings = {"data": "synthetic", "batch": 64, "steps": steps, "epochs": 1, "samples": 64 * steps, "eval_every": 0}
    return str(lab.run("mnist_lenet", **settings, shares="equal").summary["job"])


def differ(lab: Rack, first: str, second: str) -> bool:
    _, found = lab.person.asks("compare", first, second)["runs"]
    print(f"  {found['verdict']}", flush=True)
    return "no difference" not in found["verdict"]


if __name__ == "__main__":
    sys.exit(main())
