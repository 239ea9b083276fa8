"""A lab for benchmarks: hosts on shaped links, a person who types `orch`, and the figures of each run.

with rack(Path("inventory/lab_a2000_v100.yaml")) as lab:
    measured = lab.run("resnet152_cifar", strategy="ddp", steps=15)
    measured.samples_per_s, measured.node("v100")["wait_ms"], measured.median("v100", "exposed_ms")
"""

from __future__ import annotations

import contextlib
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import duckdb
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.lab import Lab, lab
from tests.support.terminal import Person

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Measured:
    """summary: the run's summary.json. steps: one row per rank and measured step."""

    summary: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def samples_per_s(self) -> float:
        return self.summary["samples_per_s"]

    @property
    def valid(self) -> bool:
        return all(node["valid"] for node in self.summary["nodes"])

    def node(self, name: str) -> dict[str, Any]:
        return next(node for node in self.summary["nodes"] if node["name"] == name)

    def median(self, node: str, column: str) -> float:
        """Over the node's measured steps."""
        return statistics.median(row[column] for row in self.steps if row["node"] == node)


@dataclass(frozen=True)
class Rack:
    lab: Lab
    person: Person

    def pace(self, inventory: str) -> None:
        """The same hosts at another pace, as if their owner had changed the file: text of an inventory."""
        described = yaml.safe_load(self.lab.inventory.read_text())
        paces = {node["name"]: node["paced"] for node in yaml.safe_load(inventory)["nodes"]}
        for node in described["nodes"]:
            node["paced"] = paces[node["name"]]
        self.lab.inventory.write_text(yaml.safe_dump(described))
        self.person.types("up", str(self.lab.inventory))

    def run(self, exp: str, nodes: Sequence[str] = (), **settings: Any) -> Measured:
        """Runs the experiment to its end and collects it."""
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        only = ["--nodes", ",".join(nodes)] if nodes else []
        self.person.types("run", "--exp", exp, *words, *only, timeout_s=900)
        summary, folder = self.collect()
        with duckdb.connect() as connection:
            rows = connection.execute(
                "SELECT * FROM read_parquet(?) WHERE measured ORDER BY step, rank", [str(folder / "steps.parquet")]
            )
            names = [column[0] for column in rows.description]
            return Measured(summary, [dict(zip(names, row, strict=True)) for row in rows.fetchall()])

    def collect(self) -> tuple[dict[str, Any], Path]:
        """The latest job's summary, and its folder; where `orch plan` looks for what was measured, too."""
        runs = self.person.folder / "runs"
        summary = self.person.asks("collect", "--job", "latest", "--out", str(runs))
        return summary, runs / summary["job"]


@contextlib.contextmanager
def rack(inventory: Path | str) -> Iterator[Rack]:
    """Brings the lab up and lets `orch up` remember it. inventory: a path, or its text."""
    end_orderly_on_term()
    with tempfile.TemporaryDirectory() as folder, lab(inventory) as hosts:
        person = Person(hosts, Path(folder, "home"), Path(folder))
        person.types("up", str(hosts.inventory))
        yield Rack(hosts, person)


def end_orderly_on_term() -> None:
    """A benchmark that is ended with SIGTERM, as by `timeout`, or by Ctrl-C in the background leaves nothing behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)


def show_machine() -> None:
    """What every figure below was measured with."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        cpu = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "unknown CPU")
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        cores = sum(line.startswith("processor") for line in file)
    print(f"{cores} cores of {cpu}, Linux {platform.release()}, Python {platform.python_version()}, "
          f"torch {version('torch')}, torchvision {version('torchvision')}", flush=True)  # fmt: skip


def spread(values: Sequence[float], digits: int = 0) -> str:
    """`326 (324 to 331)`: median, least and largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
