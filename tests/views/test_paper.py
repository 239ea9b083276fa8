"""A run's figures as files: tables that other programs read, plots in two forms."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import duckdb
import pytest

from orchestrator.paths import RunFolder
from orchestrator.results import Summary
from orchestrator.results.analyse import analyse
from orchestrator.views import write_figures
from tests.support.run_folders import Host, end, start, step, two_hosts, write_run


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunFolder, Summary]:
    """Two hosts, 40 measured steps of 100 ms with 10 and 30 samples, two evaluations, one change of shares."""
    looked = {"event": "eval", "epoch": 0, "step": 20, "samples": 10, "accuracy": 0.9, "loss": 0.1}
    again = {**looked, "epoch": 1, "step": 40, "accuracy": 0.95}
    shares = {"event": "rebalance", "step": 12, "shares": [10, 30], "before": [20, 20], "spread": 0.4}
    ranks = {
        rank: [start(rank=rank), *(step(n, samples, 0, 80, 20, 0) for n in range(43)), shares, looked, again, end()]
        for rank, samples in enumerate((10, 30))
    }
    folder = write_run(tmp_path / "run", [Host("a2000"), Host('v100, the "big" one')], ranks)
    return folder, analyse(folder)


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_every_table_is_there_in_three_forms_with_the_same_figures(
    run: tuple[RunFolder, Summary], tmp_path: Path
) -> None:
    folder = tmp_path / "figures"
    written = {path.name for path in write_figures(*run, folder)}
    tables = ("hosts", "speeds", "loss", "evaluations", "shares", "steps")
    assert written >= {f"{name}.{suffix}" for name in tables for suffix in ("csv", "jsonl", "parquet")}
    assert written == {path.name for path in folder.iterdir()}  # nothing half-written beside them
    for name in tables:
        with duckdb.connect() as connection:
            found = connection.execute(f"SELECT * FROM '{folder}/{name}.parquet'").fetchall()
            names = [column[0] for column in connection.description]
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        assert [list(line) for line in lines] == [names] * len(found)
        assert [tuple(line.values()) for line in lines] == found
        assert len(found) == len(rows(folder / f"{name}.csv")) > 0
    assert [row["name"] for row in rows(folder / "hosts.csv")] == ["a2000", 'v100, the "big" one']
    assert float(rows(folder / "hosts.csv")[1]["samples_per_s"]) == pytest.approx(300)
    assert [float(row["accuracy"]) for row in rows(folder / "evaluations.csv")] == [0.9, 0.95]
    assert [(row["step"], row["rank"], row["samples"]) for row in rows(folder / "shares.csv")] == [
        *[("0", "0", "20"), ("0", "1", "20")],
        *[("12", "0", "10"), ("12", "1", "30")],
    ]


def test_every_plot_is_there_as_a_drawing_and_as_a_picture(run: tuple[RunFolder, Summary], tmp_path: Path) -> None:
    written = [path for path in write_figures(*run, tmp_path / "figures") if path.suffix in (".svg", ".png")]
    assert {path.stem for path in written} == {"step", "throughput", "speeds", "loss", "accuracy"}
    for path in written:
        if path.suffix == ".svg":
            assert ET.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_the_same_run_gives_the_same_bytes(run: tuple[RunFolder, Summary], tmp_path: Path) -> None:
    first, second = (
        {path.name: path.read_bytes() for path in write_figures(*run, tmp_path / name) if path.suffix != ".parquet"}
        for name in ("one", "two")
    )
    assert first == second


def test_what_a_run_does_not_have_is_not_written(tmp_path: Path) -> None:
    folder = two_hosts(tmp_path / "run")
    written = {path.name for path in write_figures(folder, analyse(folder), tmp_path / "figures")}
    assert "hosts.csv" in written and "throughput.svg" in written
    assert not {name for name in written if name.startswith(("shares", "speeds", "epochs", "accuracy"))}
