"""Is the lab's ruler straight? Links carry what they are shaped to, paced hosts keep their pace, overload is noticed.

    .venv/bin/python tests/bench/ruler.py [BLOCKS]

- iperf3 between two hosts of a lab, both directions, against the shaped rate (within 5 %: headers take 4.4 % at an MTU
  of 1500);
- every paced GPU of inventory/lab_*.yaml alone, with ResNet-152's whole gradient, against its nominal speed (within
  2 %), that of the catalogue's twins, too; blocks of all GPUs in turn;
- a GPU so fast that this machine cannot stand in for it: its figures must be called not valid.

Exits 1 where one of these does not hold. Needs root, as the lab does.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass

import yaml
from rack import ROOT, Rack, rack, show_machine, spread
from rows import goodput_gbps

BATCH, STEPS, WARMUP = 128, 23, 3
LINKS_BPS = {"2.5Gbps": 2.5e9, "1Gbps": 1e9}
BEYOND_SAMPLES_PER_S = 60_000
"""A pace at which one step after the other, empty as it is, takes more than a core."""


def main() -> int:
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    show_machine()
    straight = [measure_link(rate, bps) for rate, bps in LINKS_BPS.items()]
    paces = nominal_paces()
    nodes = "".join(
        f"\n  - {{name: n{i}, host: 10.77.4.{i + 1}, gpu: {pace.gpu}, paced: {pace.as_written}}}"
        for i, pace in enumerate(paces)
    )
    nodes += f"\n  - {{name: beyond, host: 10.77.4.99, paced: {{samples_per_s: {BEYOND_SAMPLES_PER_S}}}}}"
    with rack("cluster: ruler\ndefaults: {device: cpu, env: {OMP_NUM_THREADS: '1'}}\nnodes:" + nodes) as lab:
        straight += measure_paces(lab, paces, blocks)
        straight.append(measure_overload(lab))
    print("the ruler is straight" if all(straight) else "THE RULER IS BENT")
    return 0 if all(straight) else 1


def measure_link(rate: str, bps: float) -> bool:
    inventory = f"cluster: link\ndefaults: {{device: cpu, bandwidth: {rate}}}\nnodes:" + "".join(
        f"\n  - {{name: n{i}, host: 10.77.4.{i}}}" for i in (1, 2)
    )
    measured = []
    with rack(inventory) as lab:
        for direction in ([], ["--reverse"], [], ["--reverse"]):
            measured.append(1e9 * goodput_gbps(lab, "n1", "n2", *direction))
    part = statistics.median(measured) / bps
    gbps = spread([value / 1e9 for value in measured], 3)
    print(f"link shaped to {rate:8} iperf3 {gbps} Gbps, {part:.3f} of it", flush=True)
    return abs(part - 1) <= 0.05


@dataclass(frozen=True, order=True)
class Nominal:
    """A GPU as a lab's inventory has it."""

    gpu: str
    samples_per_s: float
    fixed_ms: float

    @property
    def as_written(self) -> str:
        return f"{{samples_per_s: {self.samples_per_s:g}, fixed_ms: {self.fixed_ms:g}}}"

    @property
    def alone_samples_per_s(self) -> float:
        return 1000 * BATCH / (self.fixed_ms + 1000 * BATCH / self.samples_per_s)


def nominal_paces() -> list[Nominal]:
    files = [yaml.safe_load(file.read_text()) for file in (ROOT / "inventory").glob("lab_*.yaml")]
    nodes = [node for file in files for node in file["nodes"] if "paced" in node]
    paces = ((node["gpu"], node["paced"]) for node in nodes)
    return sorted({Nominal(gpu, pace["samples_per_s"], pace.get("fixed_ms", 0.0)) for gpu, pace in paces})


def measure_paces(lab: Rack, paces: list[Nominal], blocks: int) -> list[bool]:
    measured: dict[Nominal, list[float]] = {pace: [] for pace in paces}
    for _ in range(blocks):
        for index, pace in enumerate(paces):
            measured[pace].append(alone(lab, f"n{index}")[0])
    right = []
    for pace, found in measured.items():
        part = statistics.median(found) / pace.alone_samples_per_s
        right.append(abs(part - 1) <= 0.02)
        print(f"{pace.gpu:16} alone, ResNet-152, batch {BATCH}: {spread(found, 1)} samples/s, "
              f"{part:.4f} of its nominal {pace.alone_samples_per_s:.0f}", flush=True)  # fmt: skip
    return right


def alone(lab: Rack, node: str) -> tuple[float, bool]:
    """samples/s, and whether they are valid."""
    run = lab.run("resnet152_cifar", [node], strategy="none", batch=BATCH, steps=STEPS, warmup_steps=WARMUP)
    return run.samples_per_s, run.valid


def measure_overload(lab: Rack) -> bool:
    speed, valid = alone(lab, "beyond")
    verdict = "called valid" if valid else "called not valid"
    print(f"asked for {BEYOND_SAMPLES_PER_S} samples/s, more than the CPU can do: {speed:.1f} samples/s, {verdict}")
    return not valid


if __name__ == "__main__":
    sys.exit(main())
