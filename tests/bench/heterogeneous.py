"""Unequal hosts on a slow link: how near each way to stay together comes to the sum of the hosts' solo speeds.

    .venv/bin/python tests/bench/heterogeneous.py [--blocks 3] [--twins a2000_v100,...] [--batch 256]
    .venv/bin/python tests/bench/heterogeneous.py --twins skew_2,skew_20 --link 40Gbps --batch 1024 --rows ddp+shares

Paced twins with ResNet-152's real gradient (232.7 MB). Each twin is one gang: every block goes through all rows in
turn, the hosts alone among them; block 0 and each block's first steps are left out; medians over the blocks, least and
largest beside them. `of the sum`: over the sum of what its hosts did alone in the same gang. `of the limit`: over the
speed of a step of forward + max(backward, fewest bytes that have to cross between hosts / iperf3's goodput); where an
average travels beside the next updates, as many of those as it takes. `plan`: what `orch run --dry-run` foresees after
a run of `--exp collectives`, and how far that is off; `auto`: the way that `strategy=auto` takes for a fidelity. Run
ruler.py first. Needs root.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rack import Rack, rack, show_machine, spread
from rows import (
    WARMUP,
    Host,
    Row,
    fastest,
    foreseen,
    goodput_gbps,
    inventory,
    measure,
    measure_links,
    planned,
    with_shares,
)

from trainer.pace import BACKWARD, FORWARD
from trainer.shares import Speed

GRADIENT_BYTES = 232_657_192
PACES = {"a2000": 333.0, "v100": 833.0, "a16": 220.0}
TWINS = {
    "a2000_v100": (("a2000", 1), ("v100", 1)),
    "a16_v100": (("a16", 1), ("v100", 1)),
    "a2000_a2000": (("a2000", 1), ("a2000", 1)),
    "a16_a16_a2000": (("a16", 2), ("a2000", 1)),
}
OF_A_SKEW = 800.0
"""Samples a second of two hosts of which one is so many times as fast."""
SHARED = {"strategy": "ddp", "shares": "fastest"}
ROWS: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "allreduce"},
    "ddp": {"strategy": "ddp", "bucket_mib": 25},
    "ddp+shares": {**SHARED, "bucket_mib": 25},
    "fitted+shares": {**SHARED, "bucket_mib": 0},
    "accumulate+shares": {**SHARED, "bucket_mib": 0, "accumulate": 4},
    "half+shares": {**SHARED, "fidelity": "half", "bucket_mib": 0},
    "compressed+shares": {**SHARED, "fidelity": "compressed", "compress_after": 0},
    "local+shares": {**SHARED, "fidelity": "local", "local_steps": 32},
    "local-waiting+shares": {**SHARED, "fidelity": "local", "local_steps": 32, "local_overlap": 0},
    "local-half+shares": {**SHARED, "fidelity": "local", "local_steps": 32, "wire": "bf16"},
    "local-parts-half+shares": {**SHARED, "fidelity": "local", "local_steps": 32, "local_batch": 64, "wire": "bf16"},
    "local-8-half+shares": {**SHARED, "fidelity": "local", "local_steps": 8, "wire": "bf16"},
}
FIDELITIES = {"exact": {}, "half": {}, "compressed": {"compress_after": 0}, "local": {}}


def main() -> None:
    asked = arguments()
    show_machine()
    for name in asked.twins.split(","):
        for batch in map(int, asked.batch.split(",")):
            compare(name, batch, asked)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--twins", default=",".join(TWINS))
    parser.add_argument("--batch", default="256")
    parser.add_argument("--link", default="2.5Gbps")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--auto", default="", help="fidelities whose best way strategy=auto shall choose, as rows")
    return parser.parse_args()


def hosts_of(twin: str, link: str) -> list[Host]:
    """`skew_5` is two hosts of which one is five times as fast."""
    if twin.startswith("skew_"):
        slower = OF_A_SKEW / (1 + float(twin.removeprefix("skew_")))
        paces = (slower, OF_A_SKEW - slower)
        return [Host(f"n{number}", 1, pace, link) for number, pace in enumerate(paces)]
    return [Host(f"{gpu}{number}", ranks, PACES[gpu], link) for number, (gpu, ranks) in enumerate(TWINS[twin])]


def compare(name: str, batch: int, asked: argparse.Namespace) -> None:
    hosts = hosts_of(name, asked.link)
    speeds = [Speed(0.0, 1000 / host.samples_per_s) for host in hosts for _ in range(host.ranks)]
    shares, told = fastest(hosts, batch)
    alone_batch = {"batch": 64} if name.startswith("skew_") else {}  # of which each takes half, however slow
    chosen = {
        "alone": {"strategy": "none", **alone_batch},
        **{row: ROWS[row] for row in ROWS if row in asked.rows.split(",")},
    }
    with rack(inventory(hosts)) as lab:
        goodput = statistics.median(goodput_gbps(lab, hosts[0].name, hosts[1].name) for _ in range(3))
        measure_links(lab)
        chosen |= {
            f"auto-{fidelity}": auto(lab, fidelity, batch, told) for fidelity in asked.auto.split(",") if fidelity
        }
        measured = measure(lab, with_shares(chosen, told), batch=batch, blocks=asked.blocks, steps=asked.steps)
        plans = {row: foreseen(lab, one) for row, one in measured.items() if row != "alone"}
    print(f"\n{name}, {asked.link} (iperf3 {goodput:.2f} Gbps), global batch {batch}, shares {shares}; {asked.blocks} "
          f"blocks, the first {WARMUP} steps of each (local: its first round) and a block before left out")  # fmt: skip
    alone = measured["alone"].alone_samples_per_s
    print(f"  sum of the hosts alone {alone:.0f} samples/s")
    for row, one in measured.items():
        if row != "alone":
            show(one, alone, limit(one.settings, speeds, shares, batch, goodput, len(hosts)), plans[row])


def auto(lab: Rack, fidelity: str, batch: int, shares: str) -> dict[str, Any]:
    asked = {"fidelity": fidelity, "batch": batch, "shares": shares, **FIDELITIES[fidelity]}
    chosen = planned(lab, {**asked, "strategy": "auto"})["settings"]
    return {**asked, "strategy": chosen["strategy"], "bucket_mib": chosen["bucket_mib"]}


def limit(
    row: Mapping[str, Any], speeds: Sequence[Speed], shares: Sequence[int], batch: int, goodput: float, hosts: int
) -> float:
    """Samples a second that no implementation of this row can exceed."""
    own = shares if row.get("shares") else [batch / len(speeds)] * len(speeds)
    compute_s = max(speed.sample_ms * share for speed, share in zip(speeds, own, strict=True)) / 1000
    half = row.get("fidelity") == "half" or row.get("wire") == "bf16"
    wire_s = 2 * (hosts - 1) / hosts * GRADIENT_BYTES / (2 if half else 1) * 8 / (goodput * 1e9)
    if row.get("fidelity") == "local":
        every = row.get("local_steps", 32)
        waits_s = every * compute_s + wire_s if row.get("local_overlap") == 0 else max(every * compute_s, wire_s)
        return every * batch / waits_s
    if row.get("fidelity") == "compressed":
        return batch / compute_s
    return batch / (FORWARD * compute_s + max(BACKWARD * compute_s, wire_s))


def show(row: Row, alone: float, most: float, plan: float) -> None:
    speed = row.samples_per_s
    valid = "" if row.valid else f", NOT VALID: {row.late:.1%} late, the CPU was the limit"
    bucket = f", bucket_mib {row.settings['bucket_mib']}" if row.name.startswith("auto") else ""
    print(f"  {row.name:22} {spread(row.speeds)} samples/s, {speed / alone:.3f} of the sum, {speed / most:.3f} of the "
          f"limit {most:.0f}, plan {plan:.0f} ({plan / speed - 1:+.1%}); {row.settings['steps']} steps a block, "
          f"{row.settings['strategy']}{bucket}{valid}")  # fmt: skip
    times = (
        f"rank {rank}: compute {row.milliseconds(rank, 'compute_ms'):.1f}"
        f"  exposed {row.milliseconds(rank, 'exposed_ms'):.1f} ms"
        for rank in row.ranks
    )
    print(f"    {';  '.join(times)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
