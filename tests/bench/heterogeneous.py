"""Unequal hosts on a slow link: how near each way to stay together comes to the sum of the hosts' solo speeds.

    .venv/bin/python tests/bench/heterogeneous.py [--blocks 3] [--twins a2000_v100,...] [--batch 256,2048]

Paced twins with ResNet-152's real gradient (232.7 MB). Each twin is one gang: every block goes through all rows in
turn, the hosts alone among them; block 0 and each block's first steps are left out; medians over the blocks, least and
largest beside them. `of the sum`: over the sum of what its hosts did alone in the same gang. `of the limit`: over the
speed of a step of forward + max(backward, fewest bytes that have to cross between hosts / iperf3's goodput); where an
average travels beside the next updates, as many of those as it takes. Of a row that averages now and then two rounds
are run and the second is measured, so that it has both the sending of an average and the arrival of the one before.
Run ruler.py first. Needs root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from rack import ROOT, Rack, rack, show_machine, spread

from trainer.pace import BACKWARD, FORWARD
from trainer.shares import Speed, fastest_shares

GRADIENT_BYTES = 232_657_192
PACES = {"a2000": 333.0, "v100": 833.0, "a16": 220.0}
TWINS = {
    "a2000_v100": (("a2000", 1), ("v100", 1)),
    "a16_v100": (("a16", 1), ("v100", 1)),
    "a2000_a2000": (("a2000", 1), ("a2000", 1)),
    "a16_a16_a2000": (("a16", 2), ("a2000", 1)),
}
ROWS: dict[str, dict[str, Any]] = {
    "alone": {"strategy": "none"},
    "allreduce": {"strategy": "allreduce"},
    "ddp": {"strategy": "ddp"},
    "ddp + shares": {"strategy": "ddp", "shares": "fastest"},
    "fitted + shares": {"strategy": "ddp", "shares": "fastest", "bucket_mib": 0},
    "half + shares": {"strategy": "ddp", "shares": "fastest", "bucket_mib": 0, "fidelity": "half"},
    "compressed + shares": {"strategy": "ddp", "shares": "fastest", "fidelity": "compressed", "compress_after": 0},
    "local + shares": {"strategy": "ddp", "shares": "fastest", "fidelity": "local", "local_steps": 32},
    "local half + shares": {
        "strategy": "ddp", "shares": "fastest", "fidelity": "local", "local_steps": 32, "wire": "bf16",
    },
}  # fmt: skip
WARMUP = 2


@dataclass(frozen=True)
class Told:
    """One rank's figures of one row and block."""

    row: str
    block: int
    rank: int
    t_ms: list[float]
    compute_ms: list[float]
    exposed_ms: list[float]
    samples: list[int]
    late: list[float]

    def measured(self, column: str) -> list[float]:
        values = getattr(self, column)
        return list(values[len(values) // 2 if "local" in self.row else WARMUP :])

    @property
    def measured_s(self) -> float:
        return sum(self.measured("t_ms")) / 1000


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
    return parser.parse_args()


def compare(name: str, batch: int, asked: argparse.Namespace) -> None:
    hosts = TWINS[name]
    speeds = [Speed(0.0, 1000 / PACES[gpu]) for gpu, count in hosts for _ in range(count)]
    shares = fastest_shares(speeds, batch)
    wanted = {row: ROWS[row] for row in ("alone", *asked.rows.split(",")) if row in ROWS}
    rows = {row: settings_of(settings, batch, asked.steps, shares, hosts) for row, settings in wanted.items()}
    with rack(inventory(hosts, asked.link)) as lab:
        goodput = goodput_gbps(lab)
        told = run(lab, {"exp": "resnet152_cifar", "blocks": asked.blocks, "rows": rows})
    print(f"\n{name}, {asked.link} (iperf3 {goodput:.2f} Gbps), global batch {batch}, shares {shares}; {asked.blocks} "
          f"blocks, the first {WARMUP} steps of each (local: its first round) and a block before left out")  # fmt: skip
    alone = sum_of_solo(told, asked.blocks)
    print(f"  sum of the hosts alone {alone:.0f} samples/s")
    for row in rows:
        if row != "alone":
            show(row, [one for one in told if one.row == row], asked.blocks, rows[row], alone,
                 limit(rows[row], speeds, shares, batch, goodput, len(hosts)))  # fmt: skip


def settings_of(
    settings: dict[str, Any], batch: int, steps: int, shares: Sequence[int], hosts: Sequence[tuple[str, int]]
) -> dict[str, Any]:
    names = [f"{gpu}{index}:{local}" for index, (gpu, count) in enumerate(hosts) for local in range(count)]
    fastest = ",".join(f"{rank}={share}" for rank, share in zip(names, shares, strict=True))
    every = settings.get("local_steps", 1)
    found = {**settings, "batch": batch, "steps": 2 * every if every > 1 else steps + WARMUP}
    return {**found, "shares": fastest} if settings.get("shares") == "fastest" else found


def inventory(hosts: Sequence[tuple[str, int]], link: str) -> str:
    nodes = [
        {"name": f"{gpu}{index}", "host": f"10.77.5.{index + 1}", "gpu": gpu, "ranks": count,
         "paced": {"samples_per_s": PACES[gpu]}} for index, (gpu, count) in enumerate(hosts)
    ]  # fmt: skip
    defaults = {"device": "cpu", "env": {"OMP_NUM_THREADS": "1"}}
    return yaml.safe_dump({"cluster": "twin", "defaults": {**defaults, "bandwidth": link}, "nodes": nodes})


def goodput_gbps(lab: Rack) -> float:
    first, second = (node["name"] for node in lab.lab.nodes[:2])
    server = lab.lab.host_popen(second, ["iperf3", "--server", "--one-off", "--json"], stdin=subprocess.DEVNULL)
    client = ["iperf3", "--client", "10.77.5.2", "--time", "3", "--omit", "1", "--json"]
    while "error" in (done := json.loads(lab.lab.host_exec(first, client).stdout)) and server.poll() is None:
        continue
    server.communicate()
    return float(done["end"]["sum_received"]["bits_per_second"]) / 1e9


def run(lab: Rack, told: dict[str, Any]) -> list[Told]:
    file = ROOT / "tests" / "bench" / "rows.json"
    file.write_text(json.dumps(told))
    try:
        lab.person.types("run", "--folder", str(ROOT), "--", str(ROOT / "tests/bench/gang_rows.py"),
                         "tests/bench/rows.json", timeout_s=3000)  # fmt: skip
    finally:
        file.unlink()
    summary = lab.person.asks("collect", "--job", "latest", "--out", str(lab.person.folder / "runs"))
    logs = (lab.person.folder / "runs" / summary["job"]).glob("nodes/*/rank-*/stdout.log")
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines() if line.startswith("{")]
    names = Told.__dataclass_fields__
    return [Told(**{name: line[name] for name in names}) for line in lines if line["block"] > 0]


def sum_of_solo(told: Sequence[Told], blocks: int) -> float:
    ranks = sorted({one.rank for one in told})
    alone = {rank: [one for one in told if one.row == "alone" and one.rank == rank] for rank in ranks}
    return sum(
        statistics.median(sum(one.measured("samples")) / one.measured_s for one in alone[rank]) for rank in ranks
    )


def limit(
    row: dict[str, Any], speeds: Sequence[Speed], shares: Sequence[int], batch: int, goodput: float, hosts: int
) -> float:
    """Samples a second that no implementation of this row can exceed."""
    own = shares if row.get("shares") else [batch / len(speeds)] * len(speeds)
    compute_s = max(speed.sample_ms * share for speed, share in zip(speeds, own, strict=True)) / 1000
    every = row.get("local_steps", 1)
    half = row.get("fidelity") == "half" or row.get("wire") == "bf16"
    wire_s = 2 * (hosts - 1) / hosts * GRADIENT_BYTES / (2 if half else 1) * 8 / (goodput * 1e9)
    if every > 1:
        return every * batch / max(every * compute_s, wire_s)
    return batch / (FORWARD * compute_s + max(BACKWARD * compute_s, wire_s))


def show(row: str, told: Sequence[Told], blocks: int, settings: dict[str, Any], alone: float, most: float) -> None:
    speeds = []
    for block in range(1, blocks + 1):
        ranks = [one for one in told if one.block == block]
        samples = sum(sum(one.measured("samples")) for one in ranks)
        speeds.append(samples / max(one.measured_s for one in ranks))
    speed = statistics.median(speeds)
    late = max(statistics.median(one.late) for one in told)
    valid = "" if late <= 0.01 else f", NOT VALID: {late:.1%} late, the CPU was the limit"
    print(f"  {row:22} {spread(speeds)} samples/s, {speed / alone:.3f} of the sum, {speed / most:.3f} of the limit "
          f"{most:.0f} ({settings['steps']} steps){valid}")  # fmt: skip
    for rank in sorted({one.rank for one in told}):
        own = [one for one in told if one.rank == rank]
        compute = statistics.median(ms for one in own for ms in one.measured("compute_ms"))
        exposed = statistics.mean(ms for one in own for ms in one.measured("exposed_ms"))
        print(f"    rank {rank}: compute {compute:.1f}  exposed {exposed:.1f} ms", flush=True)


if __name__ == "__main__":
    sys.exit(main())
