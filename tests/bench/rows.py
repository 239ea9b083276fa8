"""Many ways to train, in turn, inside one gang: the controller's side of `gang_rows.py`.

with rack(inventory(hosts, "2.5Gbps")) as lab:
    rows = measure(lab, {"alone": {...}, "ddp": {...}}, batch=256, blocks=3, steps=8)
    rows["ddp"].speeds                              samples/s of each block
    predicted(lab, rows["ddp"])                      what `orch run --dry-run` says of the same settings
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml
from rack import ROOT, Rack

from trainer.shared import GB_PER_S, LOCAL_STEPS, Speed, fastest_shares, overlap_of

WARMUP = 2
"""Steps at the begin of each block that are left out, where nothing is averaged now and then."""
MOST_LATE, MOST_BUSY = 0.01, 0.9
"""Beyond either the CPU was the limit, not the pace or the link: the part of its time that a rank was late, which is as
much as its figures can be wrong by, and the part of all cores' time in which they did something."""


@dataclass(frozen=True)
class Host:
    """bandwidth, fixed_ms, gb_per_s, ...: as in an inventory. Without samples_per_s its ranks compute."""

    name: str
    ranks: int
    samples_per_s: float | None = None
    bandwidth: str = "2.5Gbps"
    fixed_ms: float = 0.0
    jitter: float = 0.0
    slowdown: tuple[Mapping[str, float], ...] = ()
    gb_per_s: float = GB_PER_S

    @property
    def as_node(self) -> dict[str, Any]:
        node = {"name": self.name, "ranks": self.ranks, "bandwidth": self.bandwidth}
        if self.samples_per_s is None:
            return node
        paced = {"samples_per_s": self.samples_per_s, "fixed_ms": self.fixed_ms, "jitter": self.jitter}
        paced |= {"gb_per_s": self.gb_per_s, "slowdown": [dict(change) for change in self.slowdown]}
        return {**node, "gpu": "paced", "paced": paced}


@dataclass(frozen=True)
class RankReport:
    """One rank's figures of one row and block, which took block_s, while the machine's cores were so busy. Of a row
    without metrics there are no others.
    """

    row: str
    block: int
    block_s: float
    busy: float
    rank: int
    t_ms: list[float]
    compute_ms: list[float]
    exposed_ms: list[float]
    samples: list[int]
    late_s: list[float]
    counts_from: int
    left_out: int

    @property
    def measured(self) -> slice:
        """left_out: last steps."""
        return slice(self.counts_from, len(self.t_ms) - self.left_out)

    @property
    def late(self) -> float:
        """Seconds of a step over what it took, both in the mean. A step may have had several micro-batches."""
        counted = self.late_s[len(self.late_s) * self.counts_from // max(1, len(self.t_ms)) :]
        return 1000 * statistics.mean(counted) / statistics.mean(self.t_ms[self.measured]) if counted else 0.0

    @property
    def samples_per_s(self) -> float:
        return 1000 * sum(self.samples[self.measured]) / sum(self.t_ms[self.measured])


@dataclass(frozen=True)
class Row:
    """One way to train, measured."""

    name: str
    settings: Mapping[str, Any]
    reports: Sequence[RankReport]

    @cached_property
    def ranks(self) -> dict[int, list[RankReport]]:
        return {
            rank: [one for one in self.reports if one.rank == rank] for rank in sorted({t.rank for t in self.reports})
        }

    @cached_property
    def speeds(self) -> list[float]:
        """samples/s of each block: of all ranks, in the time of the slowest."""
        found = []
        for block in sorted({one.block for one in self.reports}):
            ranks = [one for one in self.reports if one.block == block]
            samples = sum(sum(one.samples[one.measured]) for one in ranks)
            found.append(1000 * samples / max(sum(one.t_ms[one.measured]) for one in ranks))
        return found

    @cached_property
    def blocks_s(self) -> list[float]:
        """Of each block: as long as its slowest rank took."""
        blocks = sorted({one.block for one in self.reports})
        return [max(one.block_s for one in self.reports if one.block == block) for block in blocks]

    @property
    def samples_per_s(self) -> float:
        return statistics.median(self.speeds)

    @property
    def late(self) -> float:
        """Of the latest rank, in the median of its blocks."""
        return max(statistics.median(one.late for one in blocks) for blocks in self.ranks.values())

    @property
    def busy(self) -> float:
        return statistics.median(one.busy for one in self.reports)

    @property
    def valid(self) -> bool:
        """Of ranks that train alone whatever keeps the cores busy is seen as late."""
        return self.late <= MOST_LATE and (self.busy <= MOST_BUSY or self.settings.get("strategy") == "none")

    @property
    def alone(self) -> dict[int, float]:
        """Of a row whose ranks train alone: samples/s of each."""
        return {rank: statistics.median(one.samples_per_s for one in blocks) for rank, blocks in self.ranks.items()}

    def milliseconds(self, rank: int, column: str) -> float:
        """A mean: of rounds of local steps, one step in many has nearly all of it."""
        return statistics.mean(ms for one in self.ranks[rank] for ms in getattr(one, column)[one.measured])


def inventory(hosts: Sequence[Host]) -> str:
    nodes = [{**host.as_node, "host": f"10.77.5.{number}"} for number, host in enumerate(hosts, start=1)]
    defaults = {"device": "cpu", "env": {"OMP_NUM_THREADS": "1"}}
    return yaml.safe_dump({"cluster": "twin", "defaults": defaults, "nodes": nodes})


def fastest(hosts: Sequence[Host], batch: int) -> tuple[tuple[int, ...], str]:
    """The shares of paced hosts with which all ranks are done at the same time, and as the setting `shares`."""
    speeds = [Speed(host.fixed_ms, 1000 / host.samples_per_s) for host in hosts for _ in range(host.ranks)]
    names = [f"{host.name}:{local}" for host in hosts for local in range(host.ranks)]
    shares = fastest_shares(speeds, batch)
    return shares, ",".join(f"{rank}={share}" for rank, share in zip(names, shares, strict=True))


def with_shares(rows: Mapping[str, Mapping[str, Any]], shares: str) -> dict[str, Mapping[str, Any]]:
    """In place of `fastest`."""
    return {name: {**row, "shares": shares} if row.get("shares") == "fastest" else row for name, row in rows.items()}


def measure(
    lab: Rack,
    rows: Mapping[str, Mapping[str, Any]],
    *,
    batch: int,
    blocks: int,
    steps: int,
    exp: str = "resnet152_cifar",
    warmup_blocks: int = 1,
) -> dict[str, Row]:
    """batch, steps: of rows that have none of their own. steps: measured ones of a block, where nothing is averaged now
    and then.
    """
    asked = {}
    for name, settings in rows.items():
        asked[name] = {"batch": batch, **settings, "steps": steps_in_all(settings, steps)}
    file = ROOT / "tests" / "bench" / "rows.json"
    file.write_text(json.dumps({"exp": exp, "blocks": warmup_blocks + blocks, "warmup": WARMUP, "rows": asked}))
    try:
        lab.person.types("run", "--folder", str(ROOT), "--", str(ROOT / "tests/bench/gang_rows.py"),
                         "tests/bench/rows.json", timeout_s=3000)  # fmt: skip
    finally:
        file.unlink()
    logs = lab.collect()[1].glob("nodes/*/rank-*/stdout.log")
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines() if line.startswith("{")]
    names = RankReport.__dataclass_fields__
    reports = [RankReport(**{name: line[name] for name in names}) for line in lines if line["block"] >= warmup_blocks]
    return {name: Row(name, asked[name], [one for one in reports if one.row == name]) for name in rows}


def steps_in_all(settings: Mapping[str, Any], steps: int) -> int:
    """Of a block: with two rounds, of a row that averages now and then, until the second average has arrived."""
    if settings.get("fidelity") != "local":
        return settings.get("steps", steps) + WARMUP + (settings.get("fidelity") == "late")
    every = int(settings.get("local_steps", LOCAL_STEPS))
    return 2 * every + overlap_of(every, int(settings.get("local_overlap", -1)))


def measure_links(lab: Rack, budget_s: float = 12.0) -> None:
    """As a person would before `orch plan`, which then knows what a message costs and what the links carry."""
    settings = {"operations": "all_reduce", "budget_s": budget_s, "max_bytes": 2**26}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    lab.person.types("run", "--exp", "collectives", *words)
    lab.collect()


def planned(lab: Rack, settings: Mapping[str, Any], exp: str = "resnet152_cifar") -> dict[str, Any]:
    """The plan of `orch run` with these settings."""
    words = [word for key, value in settings.items() if key != "steps" for word in ("--set", f"{key}={value}")]
    return lab.person.asks("run", "--exp", exp, *words, "--dry-run")


def predicted(lab: Rack, row: Row) -> float:
    """samples/s"""
    return float(planned(lab, row.settings)["prediction"]["samples_per_s"])


def goodput_gbps(lab: Rack, first: str, second: str, *options: str) -> float:
    """What iperf3 brings from one host to the other."""
    address = next(node["host"] for node in lab.lab.nodes if node["name"] == second)
    server = lab.lab.host_popen(second, ["iperf3", "--server", "--one-off", "--json"], stdin=subprocess.DEVNULL)
    client = ["iperf3", "--client", address, "--time", "3", "--omit", "1", "--json", *options]
    # With --json it exits 0 whatever happens; as long as the server does not listen yet, it says so.
    while "error" in (done := json.loads(lab.lab.host_exec(first, client).stdout)) and server.poll() is None:
        continue
    server.communicate()
    return float(done["end"]["sum_received"]["bits_per_second"]) / 1e9
