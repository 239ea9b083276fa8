"""Seconds to an accuracy, by the clock, at the pace of a V100 and an A2000 that are not there: one row a way to train.

    .venv/bin/python tests/bench/accuracy.py DATA_DIR [--network lenet] [--target 0.987] [--epochs 6] [--seeds 3]
                                             [--slow-motion 2] [--rows "ddp; pipeline"] [--out FILE]

A small network learns MNIST for real, in batches of 256: LeNet, or small_resnet, which has BatchNorm. Paces are the
catalogue's for ResNet-152 in fp32. Rows that exchange gradients are `paced: {like: mnist_lenet}`, over a link that is
as slow for them as 2.5 Gbps is for ResNet-152's: the exchange takes the same part of a step. Pipelines (`pipeline`
and `late`) are like ResNet-152 itself (`like: resnet152_cifar`), cut by the plan, at 2.5 Gbps. Everything, the links
too, is slower by `--slow-motion`, so that two cores suffice; the seconds shown are divided by it.

The learning rate falls as a cosine to the last epoch, and a run ends with the evaluation that reaches the target. Its
seconds are those of its updates, evaluations left out, up to where accuracy crosses the target on the line between the
last two evaluations, one an epoch. `of ddp` and `of alone` are these seconds over those of ddp and of the fastest host
alone: below 1 is faster. Rows beside the usual ones: the A2000 alone, which learns what the V100 does, and ddp with
equal shares. A row is valid where no rank was later than its pace allows. --out: each run's line as JSON, at once;
runs that stand there with the same settings are not made again. Needs root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rack import Rack, rack, show_machine, spread

from orchestrator.forecast import estimate, gradient_bytes, layers_of
from orchestrator.hosts import find_card
from trainer.compute.models import gradient_bytes as bytes_of
from trainer.compute.models import skeleton_of
from trainer.shared import fastest_shares

LENET_BYTES = gradient_bytes(layers_of("lenet", (1, 28, 28), 10))
LINK_BPS = 2.5e9
BATCH = 256
CARDS = {"v100": find_card("V100"), "a2000": find_card("A2000")}
LAYERS = layers_of("resnet152", (3, 32, 32), 10)
RESNET_BYTES = gradient_bytes(LAYERS)
SPEEDS = {name: estimate(card, LAYERS, "none").speed for name, card in CARDS.items() if card}
SHARES = fastest_shares(list(SPEEDS.values()), BATCH)
BY_SPEED = ",".join(f"{name}={share}" for name, share in zip(SPEEDS, SHARES, strict=True))
RATES = {"lenet": 0.05, "small_resnet": 0.1}
"""The networks, and the learning rate that falls to 0."""
SLOW_MOTION = {"lenet": 2.0, "small_resnet": 4.0}
"""A core trains some 5,700 and 2,800 samples/s, and a V100's stand-in has to train 4,400 divided by this."""
ROWS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "v100 alone": (("v100",), {}),
    "a2000 alone": (("a2000",), {}),
    "ddp": ((), {"shares": BY_SPEED}),
    "ddp, equal shares": ((), {"shares": "equal"}),
    "half": ((), {"shares": BY_SPEED, "fidelity": "half"}),
    "compressed": ((), {"shares": BY_SPEED, "fidelity": "compressed"}),
    "local": ((), {"shares": BY_SPEED, "fidelity": "local"}),
    "pipeline": ((), {"strategy": "pipeline"}),
    "late": ((), {"strategy": "pipeline", "fidelity": "late"}),
}
"""Which hosts take part (none: all), and their settings."""
SELDOM = ("a2000 alone", "ddp, equal shares")
COLUMNS = f"{'':18} {'seconds to it':>24} {'of ddp':>7} {'of alone':>8} {'samples/s':>10} {'last accuracy':>24}"


@dataclass(frozen=True)
class Asked:
    """What makes a run; with its row and seed it is done once."""

    network: str
    target: float
    epochs: int
    slow_motion: float


@dataclass(frozen=True)
class Tried:
    """One run. seconds: None where it did not come to the target. accuracy: the last one."""

    row: str
    seed: int
    seconds: float | None
    epochs: int
    samples_per_s: float
    accuracy: float
    valid: bool

    @property
    def words(self) -> str:
        seconds = "not reached" if self.seconds is None else f"{self.seconds:.1f} s"
        valid = "" if self.valid else ", NOT valid: this machine was too slow"
        found = f"{seconds}, {self.epochs} epochs, {self.samples_per_s:.0f} samples/s, {100 * self.accuracy:.2f} %"
        return f"  {self.row}, seed {self.seed}: {found}{valid}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--network", choices=RATES, default="lenet")
    parser.add_argument("--target", type=float, default=0.987, help="one process: third to fifth epoch of six")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--slow-motion", type=float, metavar="K", help="times as slow as the cards and the link")
    parser.add_argument("--rows", default="; ".join(row for row in ROWS if row not in SELDOM), help="divided by ;")
    parser.add_argument("--out", type=Path, help="keeps each run's line, and goes on from there")
    words = parser.parse_args()
    asked = Asked(words.network, words.target, words.epochs, words.slow_motion or SLOW_MOTION[words.network])
    show_machine()
    print(f"{asked.network}, paces and links divided by {asked.slow_motion:g}, to {100 * asked.target:g} %", flush=True)
    runs: dict[str, list[Tried]] = {}
    for row in [row.strip() for row in words.rows.split(";")]:
        runs[row] = row_of(row, asked, words)
        print(f"{COLUMNS}  reached valid\n{line(row, runs)}", flush=True)
    print("\n".join([f"\n{COLUMNS}  reached valid", *(line(row, runs) for row in runs)]), flush=True)


def row_of(row: str, asked: Asked, words: argparse.Namespace) -> list[Tried]:
    known = kept(words.out, asked, row)
    missing = [seed for seed in range(words.seeds) if seed not in known]
    if missing:
        with rack(inventory(row, asked)) as lab:
            for name in ROWS[row][0] or SPEEDS:
                bring(lab, name, words.data_dir / "MNIST" / "raw")
            for seed in missing:
                known[seed] = tried(lab, row, seed, asked)
                print(known[seed].words, flush=True)
                keep(words.out, asked, known[seed])
    return [known[seed] for seed in range(words.seeds)]


def kept(out: Path | None, asked: Asked, row: str) -> dict[int, Tried]:
    """By their seeds."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    runs = [Tried(**line["run"]) for line in lines if line["asked"] == asdict(asked)]
    return {run.seed: run for run in runs if run.row == row}


def keep(out: Path | None, asked: Asked, run: Tried) -> None:
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps({"asked": asdict(asked), "run": asdict(run)}) + "\n")


def inventory(row: str, asked: Asked) -> str:
    is_cut = ROWS[row][1].get("strategy") == "pipeline"
    sent = LENET_BYTES + bytes_of(skeleton_of(asked.network, (1, 28, 28), 10))
    link_bps = LINK_BPS / asked.slow_motion * (1 if is_cut else sent / RESNET_BYTES)
    like = "resnet152_cifar" if is_cut else "mnist_lenet"
    hosts = "".join(
        f"  - {{name: {name}, host: 10.79.0.{number}, paced: {{{pace_of(name, asked)}, like: {like}}}}}\n"
        for number, name in enumerate(SPEEDS, start=1)
    )
    defaults = "user: lab, key_file: /run/orch-lab/id_ed25519, device: cpu, ranks: 1, env: {OMP_NUM_THREADS: '1'}"
    return f"cluster: accuracy\ndefaults: {{{defaults}, bandwidth: {link_bps / 1e6:.3f}Mbps}}\nnodes:\n{hosts}"


def pace_of(name: str, asked: Asked) -> str:
    speed, card, times = SPEEDS[name], CARDS[name], asked.slow_motion
    assert card
    paces = {"samples_per_s": 1000 / speed.sample_ms / times, "fixed_ms": speed.fixed_ms * times}
    return ", ".join(f"{key}: {value}" for key, value in {**paces, "gb_per_s": card.gb_per_s / times}.items())


def bring(lab: Rack, node: str, raw: Path) -> None:
    """MNIST's files to where a run looks for them."""
    lab.lab.host_exec(node, ["mkdir", "-p", "data/MNIST/raw"], as_user=True, check=True)
    for file in raw.glob("*.gz"):
        with open(file, "rb") as content:
            target = f"data/MNIST/raw/{file.name}"
            lab.lab.host_exec(node, ["sh", "-c", f"cat >{target}"], as_user=True, stdin=content, check=True)


def tried(lab: Rack, row: str, seed: int, asked: Asked) -> Tried:
    nodes, settings = ROWS[row]
    common = {"model": asked.network, "batch": BATCH, "epochs": asked.epochs, "seed": seed}
    goal = {"target_accuracy": asked.target, "lr_schedule": "cosine", "lr": RATES[asked.network]}
    found = lab.run("mnist_lenet", nodes, **common, **goal, **settings)
    curves = found.summary["curves"]
    ends = list(accumulate(epoch["seconds"] for epoch in curves["epochs"]))
    accuracies = [one["accuracy"] for one in curves["evaluations"]]
    seconds = crossing(ends, accuracies, asked.target)
    times = asked.slow_motion
    own_s = seconds and seconds / times
    return Tried(row, seed, own_s, len(ends), times * found.samples_per_s, accuracies[-1], found.valid)


def crossing(ends: Sequence[float], accuracies: Sequence[float], target: float) -> float | None:
    """When accuracy came to the target, between two evaluations on a straight line. ends: of the epochs before each."""
    number = next((number for number, accuracy in enumerate(accuracies) if accuracy >= target), None)
    if not number:
        return None if number is None else ends[0]
    before, after = accuracies[number - 1 : number + 1]
    return ends[number - 1] + (target - before) / (after - before) * (ends[number] - ends[number - 1])


def line(row: str, rows: Mapping[str, Sequence[Tried]]) -> str:
    runs = rows[row]
    reached = [run.seconds for run in runs if run.seconds is not None]
    seconds = spread(reached, 1) if reached else "-"
    alone = [each for name, of in rows.items() if name.endswith(" alone") and (each := median_seconds(of))]
    of_ddp, of_alone = ratio(runs, median_seconds(rows.get("ddp", ()))), ratio(runs, min(alone, default=None))
    accuracy = spread([100 * run.accuracy for run in runs], 2)
    speed = statistics.median(run.samples_per_s for run in runs)
    counts = f"{len(reached)}/{len(runs)}     {sum(run.valid for run in runs)}/{len(runs)}"
    return f"{row:18} {seconds:>24} {of_ddp:>7} {of_alone:>8} {speed:10.0f} {accuracy:>24}  {counts}"


def median_seconds(runs: Sequence[Tried]) -> float | None:
    """Of those that came to the target; None where fewer than half of them did."""
    reached = [run.seconds for run in runs if run.seconds is not None]
    return statistics.median(reached) if reached and 2 * len(reached) >= len(runs) else None


def ratio(runs: Sequence[Tried], base_s: float | None) -> str:
    own_s = median_seconds(runs)
    return f"{own_s / base_s:.2f}" if own_s and base_s else "-"


if __name__ == "__main__":
    sys.exit(main())
