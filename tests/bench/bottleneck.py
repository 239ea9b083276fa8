"""A delay put into one rank on purpose: do the figures find it, where it is and how long?

    .venv/bin/python tests/bench/bottleneck.py

- allreduce, LeNet, three paced ranks on two hosts: the delay must stand as wait on both other ranks (within 10 %,
  medians of 50 steps) and its host must be named;
- ddp, ResNet-152's gradient, two paced hosts at 2.5 Gbps: a delay at the end of backward, shorter than the wire time
  that backward hides, costs nobody anything.

Exits 1 where this does not hold. Needs root, as the lab does.
"""

from __future__ import annotations

import statistics
import sys

from rack import ROOT, Measured, Rack, rack, show_machine

THREE_RANKS = """
cluster: bottleneck
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.6.1, paced: {samples_per_s: 4000}}
  - {name: beta, host: 10.77.6.2, ranks: 2, paced: {samples_per_s: 4000}}
"""


def main() -> int:
    show_machine()
    found = []
    print("allreduce, LeNet, rank 1 (on beta) held up; medians of 50 steps")
    with rack(THREE_RANKS) as lab:
        for place in ("start", "backward", "sync"):
            found += [blocking(lab, place, ms) for ms in (50, 200)]
        found += [blocking(lab, "call", ms, times=10) for ms in (5, 20)]
    print("ddp, ResNet-152, equal hosts at 2.5 Gbps, rank 1 held up at the end of backward; medians of 20 steps")
    with rack(ROOT / "inventory" / "lab_a2000_a2000.yaml") as lab:
        plain = overlapped(lab, 0)
        found += [hidden(plain, overlapped(lab, ms), ms) for ms in (50, 150)]
    print("every delay was found as it was" if all(found) else "A DELAY WAS NOT FOUND")
    return 0 if all(found) else 1


def blocking(lab: Rack, place: str, ms: int, times: int = 1) -> bool:
    """times: how often a step is held up there; LeNet's ten parameters have a call each."""
    run = lab.run("mnist_lenet", strategy="allreduce", batch=96, steps=53, slow=f"rank:1,at:{place},ms:{ms}")
    waits = {rank: of_rank(run, rank, "wait_ms") for rank in (0, 1, 2)}
    straggler = run.summary["straggler"]
    named = straggler["node"] if straggler else "nobody"
    shown = "  ".join(f"rank {rank} {wait:6.1f}" for rank, wait in waits.items())
    print(f"  {times:2} x {ms:3} ms at {place:8} wait ms: {shown}   straggler: {named}", flush=True)
    return named == "beta" and all(abs(waits[rank] / (times * ms) - 1) <= 0.1 for rank in (0, 2))


def overlapped(lab: Rack, ms: int) -> Measured:
    slow = f"rank:1,at:sync,ms:{ms}" if ms else ""
    return lab.run("resnet152_cifar", strategy="ddp", batch=256, steps=23, slow=slow)


def hidden(plain: Measured, held_up: Measured, ms: int) -> bool:
    """Whether the delay shows as compute of rank 1, and as wait of nobody."""
    wire_hidden_ms = of_rank(plain, 1, "comm_ms") - of_rank(plain, 1, "exposed_ms")
    steps = [statistics.median(row["t_ms"] for row in run.steps) for run in (plain, held_up)]
    compute = [of_rank(run, 1, "compute_ms") for run in (plain, held_up)]
    waits = [of_rank(run, 0, "wait_ms") for run in (plain, held_up)]
    print(f"  {ms:3} ms, backward hides {wire_hidden_ms:.0f} ms of the wire: rank 1 computes {compute[0]:.1f} -> "
          f"{compute[1]:.1f} ms, rank 0 waits {waits[0]:.1f} -> {waits[1]:.1f} ms, a step takes {steps[0]:.0f} -> "
          f"{steps[1]:.0f} ms", flush=True)  # fmt: skip
    return ms < wire_hidden_ms and waits[1] - waits[0] < 0.1 * ms and compute[1] - compute[0] > 0.9 * ms


def of_rank(run: Measured, rank: int, column: str) -> float:
    return statistics.median(row[column] for row in run.steps if row["rank"] == rank)


if __name__ == "__main__":
    sys.exit(main())
