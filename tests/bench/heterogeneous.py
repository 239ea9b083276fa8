"""Unequal hosts on a slow link: how near each way to stay together comes to the sum of the hosts' solo speeds.

    .venv/bin/python tests/bench/heterogeneous.py [--twins a2000_v100,...] [--batch 256,2048] [--speeds slow,catalogue]
    .venv/bin/python tests/bench/heterogeneous.py --speeds fp32,fp16 --slow-motion 8 --rows ddp+shares,pipeline
    .venv/bin/python tests/bench/heterogeneous.py --twins skew_2,skew_20 --link 40Gbps --batch 1024 --rows ddp+shares

Paced twins with ResNet-152's real gradient (232.7 MB), at two speeds side by side: those that inventory/lab_*.yaml
assume, which leave two cores time enough, and those that the hardware catalogue estimates for the same cards, four to
six times as fast, which two cores cannot always keep (docs/twins.md). fp32 and fp16 are the catalogue of cards' own
speeds (docs/planning.md); 15+0.38/10+0.19 are milliseconds a step and a sample of each host. --slow-motion K slows
hosts and links by the same factor, so that two cores keep every pace:
rates are shown K times as large, and ratios are those of the cards, except for Gloo's own 1 ms a message, which counts
for a Kth. Each speed is one gang: every block goes through
all rows in turn, the hosts alone among them; each block's first steps are left out; medians over the blocks.

    sum         over the sum of what the hosts did alone, each with the whole batch, in the same gang
    limit       over the speed of a step of forward + max(backward, fewest bytes that have to cross between hosts /
                iperf3's goodput); where an average travels beside the next updates, as many of those as it takes; of
                a pipeline, whose bytes a link carries at once, over the sum
    plan, sim   of the sum, as `orch plan` predicts after a run of `--exp collectives`, and as the simulator plays it
    0.9 to      how many times as fast all hosts may be, by the same prediction, until the row is below 0.9 of the sum

A star marks what is not valid, since this machine's CPU was the limit; plan and sim then stand for it, and for a host
alone its pace. `auto-...`: the
way that `strategy=auto` takes for a fidelity. Run ruler.py first. Needs root.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from model import Model
from rack import ROOT, Rack, rack, show_machine
from rows import WARMUP, Host, Row, fastest, goodput_gbps, inventory, measure, measure_links, planned, with_shares

from orchestrator.forecast import estimate, gradient_bytes, layers_in, network_of
from orchestrator.hosts import Card, find_card
from orchestrator.units import format_bandwidth, parse_bandwidth
from trainer.shared import Speed, equal_shares, parse_settings
from trainer.shared.pace import BACKWARD, FORWARD
from trainer.shared.settings import Settings

GATHERED, ADDED_UP = 460_298, 450_048
"""Numbers of a sample in the outputs of all layers that strategy tensor cuts, and in the gradients of their inputs."""
TWINS = ("a2000_v100", "a16_v100", "a2000_a2000", "a16_a16_a2000")
FILES = {"slow": "lab_{}.yaml", "catalogue": "lab_{}_catalogue.yaml"}
AMP = {"fp32": "none", "fp16": "fp16"}
"""Speeds of the catalogue of cards."""
OF_A_SKEW = 800.0
"""Samples a second of two hosts of which one is so many times as fast, or of one host's ranks."""
ENOUGH = 0.9
"""Of the sum."""
SHARED = {"strategy": "ddp", "shares": "fastest"}
ROWS: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "allreduce"},
    "ddp": {"strategy": "ddp", "bucket_mib": 25},
    "ddp+shares": {**SHARED, "bucket_mib": 25},
    "fitted+shares": {**SHARED, "bucket_mib": 0},
    "accumulate+shares": {**SHARED, "bucket_mib": 0, "accumulate": 4},
    "half+shares": {**SHARED, "fidelity": "half", "bucket_mib": 0},
    "compressed+shares": {**SHARED, "fidelity": "compressed", "compress_after": 0},
    "pipeline": {"strategy": "pipeline"},
    "pipeline-1f1b": {"strategy": "pipeline", "schedule": "1f1b"},
    "pipeline-half": {"strategy": "pipeline", "fidelity": "half"},
    "late": {"strategy": "pipeline", "fidelity": "late", "late_after": 0},
    "late-half": {"strategy": "pipeline", "fidelity": "late", "late_after": 0, "wire": "bf16"},
    "tensor": {"strategy": "tensor", "shares": "fastest"},
    "tensor-half": {"strategy": "tensor", "shares": "fastest", "fidelity": "half"},
    "local+shares": {**SHARED, "fidelity": "local"},
    "local-waiting+shares": {**SHARED, "fidelity": "local", "local_overlap": 0},
    "local-half+shares": {**SHARED, "fidelity": "local", "wire": "bf16"},
    "local-parts-half+shares": {**SHARED, "fidelity": "local", "local_batch": 64, "wire": "bf16"},
    "local-8+shares": {**SHARED, "fidelity": "local", "local_steps": 8},
    "local-8-half+shares": {**SHARED, "fidelity": "local", "local_steps": 8, "wire": "bf16"},
}
LOCAL = {False: {"local_steps": 32}, True: {"local_steps": 8, "local_overlap": 4}}
"""Of rows that do not say, by whether a batch is large: of 1,024 samples or more."""
FIDELITIES = {"exact": {}, "half": {}, "compressed": {"compress_after": 0}, "late": {"late_after": 0}, "local": {}}


def main() -> None:
    asked = arguments()
    show_machine()
    for twin in asked.twins.split(","):
        compare(twin, asked)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="at most, of a row in a block")
    parser.add_argument("--row-s", type=float, default=6.0, help="about so long does a row take in a block, at most")
    parser.add_argument("--twins", default=",".join(TWINS))
    parser.add_argument("--speeds", default="slow,catalogue", help="of the twins; each has to have a lab inventory")
    parser.add_argument("--exp", default="resnet152_cifar")
    parser.add_argument("--set", default="", help="settings of all rows: model=gpt2_small,tokens=1024")
    parser.add_argument("--batch", default="256")
    parser.add_argument("--link", default="2.5Gbps")
    parser.add_argument("--slow-motion", type=float, default=1.0, metavar="K", help="times as slow, hosts and links")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--auto", default="", help="fidelities whose best way strategy=auto shall choose, as rows")
    parser.add_argument("--details", action="store_true", help="the spread of the blocks, and each rank's milliseconds")
    return parser.parse_args()


def speeds_of(twin: str, asked: argparse.Namespace) -> dict[str, list[Host]]:
    """`skew_5` is two hosts of which one is five times as fast, at one speed; `inside_2` one host of two ranks."""
    if twin.startswith("skew_"):
        slower = OF_A_SKEW / (1 + float(twin.removeprefix("skew_")))
        return {"slow": [Host(f"n{n}", 1, pace, asked.link) for n, pace in enumerate((slower, OF_A_SKEW - slower))]}
    if twin.startswith("inside_"):
        ranks = int(twin.removeprefix("inside_"))
        return {"slow": [Host("n0", ranks, OF_A_SKEW / ranks, asked.link)]}
    found = {}
    link = format_bandwidth(parse_bandwidth(asked.link) / asked.slow_motion)
    for name in asked.speeds.split(","):
        lines = [card_line(card, AMP[name], asked) for card in twin.split("_")] if name in AMP else lines_in(name)
        if lines:
            cards = twin.split("_")
            hosts = [host_of(card, line, link) for card, line in zip(cards, lines, strict=True)]
            found[name] = [slowed(host, asked.slow_motion) for host in told_apart(hosts)]
            continue
        for folder in (ROOT / "inventory", ROOT / "tests" / "bench"):
            if (file := folder / FILES[name].format(twin)).exists():
                found[name] = [slowed(host, asked.slow_motion) for host in hosts_in(file, link)]
    return found


def card_line(card: str, amp: str, asked: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds a step and a sample, by the catalogue."""
    speed = estimate(card_of(card), layers_in(network_of(settings_of(asked))), amp).speed
    return speed.fixed_ms, speed.sample_ms


def lines_in(text: str) -> list[tuple[float, float]]:
    """Reads `15+0.38/10+0.19`; empty for another name."""
    pairs = [part.split("+") for part in text.split("/")]
    return [(float(fixed), float(sample)) for fixed, sample in pairs] if "+" in text else []


def host_of(card: str, line: tuple[float, float], link: str) -> Host:
    return Host(card, 1, 1000 / line[1], link, line[0], gb_per_s=card_of(card).gb_per_s)


def told_apart(hosts: Sequence[Host]) -> list[Host]:
    """Names hosts of one card a2000-1, a2000-2."""
    names = [host.name for host in hosts]
    return [
        replace(host, name=f"{host.name}-{n}") if names.count(host.name) > 1 else host
        for n, host in enumerate(hosts, start=1)
    ]


def card_of(name: str) -> Card:
    found = find_card(name)
    assert found, name
    return found


def settings_of(asked: argparse.Namespace) -> Settings:
    return parse_settings(asked.exp, {name: str(value) for name, value in settings_given(asked).items()})


def settings_given(asked: argparse.Namespace) -> dict[str, str | int]:
    pairs = dict(pair.split("=", 1) for pair in asked.set.split(",") if pair)
    return {name: int(value) if value.isdecimal() else value for name, value in pairs.items()}


def slowed(host: Host, times: float) -> Host:
    pace = host.samples_per_s / times if host.samples_per_s else None
    return replace(host, samples_per_s=pace, fixed_ms=host.fixed_ms * times, gb_per_s=host.gb_per_s / times)


def hosts_in(file: Path, link: str) -> list[Host]:
    nodes = yaml.safe_load(file.read_text())["nodes"]
    return [Host(node["name"], node.get("ranks", 1), bandwidth=link, **node["paced"]) for node in nodes]


@dataclass(frozen=True)
class Column:
    """One speed of a twin with one batch. rows: measured, by name; alone: samples/s of each host."""

    speed: str
    batch: int
    hosts: Sequence[Host]
    shares: Sequence[int]
    alone: Mapping[str, float]
    rows: Mapping[str, Row]
    model: Model
    goodput_gbps: float
    times: float
    """Slow motion."""
    gradient_bytes: int

    @property
    def sum(self) -> float:
        return sum(self.alone.values())


def compare(twin: str, asked: argparse.Namespace) -> None:
    speeds = speeds_of(twin, asked)
    batches = [int(batch) for batch in asked.batch.split(",")]
    columns: list[Column] = []
    first = next(iter(speeds.values()))
    with rack(inventory(first)) as lab:
        names = [host.name for host in first]
        goodput = math.inf  # of one host, which has no link
        if len(names) > 1:
            goodput = statistics.median(goodput_gbps(lab, names[0], names[1]) for _ in range(3))
        measure_links(lab)
        for speed, hosts in speeds.items():
            lab.pace(inventory(hosts))
            columns += measured_columns(lab, speed, hosts, batches, goodput, asked)
    for batch in batches:
        links = f"iperf3 {goodput:.2f} Gbps, an all_reduce {columns[0].model.measured_gbps:.2f}"
        print(f"\n{twin}, {asked.link} ({links}), global batch {batch}; {asked.blocks} blocks")
        show([column for column in columns if column.batch == batch], asked.details)


def measured_columns(
    lab: Rack, speed: str, hosts: Sequence[Host], batches: Sequence[int], goodput: float, asked: argparse.Namespace
) -> list[Column]:
    """All batches in one gang."""
    network = settings_given(asked)
    model = Model(planned(lab, network, asked.exp), lab.person.folder / "runs")
    size = gradient_bytes(layers_in(network_of(settings_of(asked))))
    chosen: dict[str, dict[str, Any]] = {}
    for batch in batches:
        shares = fastest(hosts, batch)[1]
        rows = {row: ROWS[row] for row in ROWS if row in asked.rows.split(",")}
        rows |= {
            f"auto-{fidelity}": auto(
                lab, {**network, "fidelity": fidelity, "batch": batch, "shares": shares}, asked.exp
            )
            for fidelity in asked.auto.split(",")
            if fidelity
        }
        rows = {name: {**network, "batch": batch, **rounds_of(row, batch), **row} for name, row in rows.items()}
        rows = with_shares(rows, shares)
        for name, row in rows.items():
            row |= model.cut(row) if row["strategy"] == "pipeline" and "stages" not in row else {}
            step_s = model.step_ms(row) / 1000
            chosen[f"{batch} {name}"] = {**row, "steps": steps_of(step_s, asked)}
        alone_s = max(batch / host.samples_per_s for host in hosts)
        chosen |= {
            f"{batch} {name}": {**network, **row, "steps": steps_of(alone_s, asked)}
            for name, row in alone(hosts, batch).items()
        }
    found = measure(
        lab, chosen, batch=batches[0], blocks=asked.blocks, steps=asked.steps, exp=asked.exp, warmup_blocks=0
    )
    columns = []
    for batch in batches:
        rows = {name.partition(" ")[2]: row for name, row in found.items() if name.startswith(f"{batch} ")}
        solo = by_host(hosts, batch, rows, model)
        columns.append(
            Column(speed, batch, hosts, fastest(hosts, batch)[0], solo, rows, model, goodput, asked.slow_motion, size)
        )
    return columns


def rounds_of(row: Mapping[str, Any], batch: int) -> dict[str, int]:
    return LOCAL[batch >= 1024] if row.get("fidelity") == "local" else {}


def steps_of(step_s: float, asked: argparse.Namespace) -> int:
    return max(1, min(asked.steps, round(asked.row_s / step_s) - WARMUP))


def alone(hosts: Sequence[Host], batch: int) -> dict[str, dict[str, Any]]:
    """A row for each number of samples that a rank takes when its host alone has the whole batch, with all ranks at it
    at the same time: `none` knows equal shares alone.
    """
    ranks = sum(host.ranks for host in hosts)
    return {f"alone {share}": {"strategy": "none", "batch": share * ranks} for share in solo_shares(hosts, batch)}


def solo_shares(hosts: Sequence[Host], batch: int) -> list[int]:
    return sorted({batch // host.ranks for host in hosts})


def by_host(hosts: Sequence[Host], batch: int, rows: Mapping[str, Row], model: Model) -> dict[str, float]:
    """As measured; as the pace has it where this machine could not keep that."""
    found, first, paces = {}, 0, model.alone(batch)
    for host in hosts:
        row = rows[f"alone {batch // host.ranks}"]
        ranks = range(first, first + host.ranks)
        found[host.name] = sum(row.alone[rank] for rank in ranks) if row.valid else paces[host.name]
        first += host.ranks
    return found


def auto(lab: Rack, asked: dict[str, Any], exp: str) -> dict[str, Any]:
    asked |= FIDELITIES[asked["fidelity"]]
    chosen = planned(lab, {**asked, "strategy": "auto"}, exp)["settings"]
    if chosen["strategy"] == "pipeline":
        cut = ("strategy", "stages", "accumulate", "in_flight", "smaller_first", "schedule")
        kept = {name: value for name, value in asked.items() if name != "shares"}
        return {**kept, **{name: chosen[name] for name in cut if name in chosen}}
    return {**asked, "strategy": chosen["strategy"], "bucket_mib": chosen["bucket_mib"]}


def limit(column: Column, row: Row) -> float:
    """Samples a second that no implementation of this row can exceed."""
    settings, hosts, batch = row.settings, column.hosts, column.batch
    if settings["strategy"] == "pipeline":
        return column.sum
    speeds = [Speed(host.fixed_ms, 1000 / host.samples_per_s) for host in hosts for _ in range(host.ranks)]
    own = column.shares if settings.get("shares") else equal_shares(batch, len(speeds))
    compute_s = max(speed.step_ms(share) for speed, share in zip(speeds, own, strict=True)) / 1000
    half = settings.get("fidelity") == "half" or settings.get("wire") == "bf16"
    second_bytes = column.goodput_gbps * 1e9 / 8 * (2 if half else 1)
    if settings["strategy"] == "tensor":
        return batch / (compute_s + most_moved(hosts, own, batch) / second_bytes)
    wire_s = 2 * (len(hosts) - 1) / len(hosts) * column.gradient_bytes / second_bytes
    if settings.get("fidelity") == "local":
        every = settings["local_steps"]
        waits_s = every * compute_s + wire_s if settings.get("local_overlap") == 0 else max(every * compute_s, wire_s)
        return every * batch / waits_s
    if settings.get("fidelity") == "compressed":
        return batch / compute_s
    return batch / (FORWARD * compute_s + max(BACKWARD * compute_s, wire_s))


def most_moved(hosts: Sequence[Host], shares: Sequence[int], batch: int) -> float:
    """Bytes that the busiest host's link carries one way, in fp32, where each layer's outputs are gathered and the
    gradients of its input added up: its own slices to each other host's ranks, or theirs to its own.
    """
    of_hosts, first = [], 0
    for host in hosts:
        of_hosts.append(sum(shares[first : first + host.ranks]) / sum(shares))
        first += host.ranks
    ranks = len(shares)
    gathered = max(
        max(own * (ranks - host.ranks), (1 - own) * host.ranks) for own, host in zip(of_hosts, hosts, strict=True)
    )
    added = 2 * (len(hosts) - 1) / len(hosts)
    return 4 * batch * ((gathered if len(hosts) > 1 else 0.0) * GATHERED + added * ADDED_UP)


# ---- the table ------------------------------------------------------------------------------------------------------

HEAD = "samples/s   sum limit  plan   sim  0.9 to"


def show(columns: Sequence[Column], details: bool) -> None:
    for column in columns:
        hosts = ", ".join(f"{host.name} {column.times * column.alone[host.name]:.0f}" for host in column.hosts)
        whole = f"{column.times * column.sum:.0f} samples/s"
        slow = f" (slow motion: measured at 1/{column.times:g})" if column.times != 1 else ""
        print(f"  {column.speed}: alone {hosts}, in sum {whole}; shares {column.shares}{slow}")
    print("  " + " | ".join([" " * 24, *(f"{column.speed:^{len(HEAD)}}" for column in columns)]))
    print("  " + " | ".join([" " * 24, *(HEAD for _ in columns)]))
    print("  " + " | ".join([f"{'the fastest host alone':24}", *(fastest_cell(column) for column in columns)]))
    for name in columns[0].rows:
        if not is_alone(name):
            print("  " + " | ".join([f"{name:24}", *(cell(column, column.rows[name]) for column in columns)]))
    for column in columns:
        for name, row in column.rows.items():
            remark(column, name, row, details)
    sys.stdout.flush()


def is_alone(name: str) -> bool:
    return name.startswith("alone ")


def fastest_cell(column: Column) -> str:
    best, paces = max(column.alone.values()), column.model.alone(column.batch).values()
    mark = " " if all(row.valid for name, row in column.rows.items() if is_alone(name)) else "*"
    return (
        f"{column.times * best:8.0f}{mark} {best / column.sum:.3f}       {max(paces) / sum(paces):.3f} {'':5}        "
    )


def cell(column: Column, row: Row) -> str:
    mark = " " if row.valid else "*"
    forecast, played = column.model.of_sum(row.settings), column.model.played_of_sum(row.settings)
    sim = "     " if played is None else f"{played:.3f}"
    times = column.model.fast_enough(row.settings, ENOUGH)
    until = "never" if times is None else f"{times:.2g} x"
    return (
        f"{column.times * row.samples_per_s:8.0f}{mark} {row.samples_per_s / column.sum:.3f} "
        f"{row.samples_per_s / limit(column, row):.3f} {forecast:.3f} {sim} {until:>7}"
    )


def remark(column: Column, name: str, row: Row, details: bool) -> None:
    if not row.valid:
        print(f"  * {column.speed}, {name}: NOT VALID, {row.late:.1%} of a step late, this machine's cores "
              f"{row.busy:.0%} busy")  # fmt: skip
    if details:
        ranks = "; ".join(
            f"rank {rank} compute {row.milliseconds(rank, 'compute_ms'):.1f} exposed "
            f"{row.milliseconds(rank, 'exposed_ms'):.1f} ms"
            for rank in row.ranks
        )
        print(f"    {column.speed}, {name}: {min(row.speeds):.0f} to {max(row.speeds):.0f} samples/s; "
              f"{row.settings['steps']} steps a block; "
              f"{cut_words(row)}{row.late:.2%} late, {row.busy:.0%} busy; {ranks}")  # fmt: skip


def cut_words(row: Row) -> str:
    if row.settings["strategy"] != "pipeline":
        return ""
    settings = row.settings
    return f"{settings['stages']}, accumulate {settings['accumulate']}, in flight {settings['in_flight']}; "


if __name__ == "__main__":
    sys.exit(main())
