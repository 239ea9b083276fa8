"""The paces of the lab's twins are assumed: what contradicts them stands beside them, as our own forecast has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from orchestrator.forecast import (
    GOODPUT,
    NCCL,
    HostSpeed,
    LinkCosts,
    Scene,
    Site,
    Way,
    Workload,
    alone_samples_per_s,
    estimate,
    layers_of,
    predict,
)
from orchestrator.hosts import find_card
from trainer.shared import Speed

ROOT = Path(__file__).resolve().parents[2]
RESNET = layers_of("resnet152", (3, 32, 32), 10)
TABLE = (ROOT / "docs" / "strategies.md").read_text()
TWINS = sorted((ROOT / "inventory").glob("lab_*.yaml"))
PACED = [path for path in TWINS if "samples_per_s" in path.read_text()]
CATALOGUE = [path for path in PACED if path.stem.endswith("_catalogue")]
LOCAL = {256: (32, 8), 2048: (8, 4)}
"""Local steps, and those that overlap, by batch."""
WAYS = (
    (Way("allreduce"), "equal"),
    (Way("ddp"), "equal"),
    (Way("ddp"), "measured"),
    (Way("ddp", "half"), "measured"),
    (Way("allreduce_flat", "compressed"), "measured"),
)
"""The columns of the table in docs/strategies.md."""


def estimated(gpu):
    return estimate(find_card(gpu), RESNET, "none").speed


@pytest.mark.parametrize("path", PACED, ids=lambda path: path.stem)
def test_every_twin_names_the_estimate_that_contradicts_its_paces_or_is_its_own(path):
    text = path.read_text()
    remark = " ".join(re.findall(r"^# ?(.*)", text, re.MULTILINE))
    for node in yaml.safe_load(text)["nodes"]:
        speed = alone_samples_per_s(HostSpeed(node["gpu"], (estimated(node["gpu"]),)), 256)
        assert re.search(rf"\b{speed:,.0f}( samples/s)? for an? {node['gpu']}\b", remark), (node["gpu"], speed)


@pytest.mark.parametrize("path", PACED, ids=lambda path: path.stem)
def test_every_twin_has_the_memory_bandwidth_of_its_card(path):
    for node in yaml.safe_load(path.read_text())["nodes"]:
        assert node["paced"]["gb_per_s"] == find_card(node["gpu"]).gb_per_s


@pytest.mark.parametrize("path", CATALOGUE, ids=lambda path: path.stem)
def test_a_twin_of_the_catalogue_is_as_fast_as_that_estimates(path):
    for node in yaml.safe_load(path.read_text())["nodes"]:
        speed, pace = estimated(node["gpu"]), node["paced"]
        assert pace["samples_per_s"] == round(1000 / speed.sample_ms)
        assert pace["fixed_ms"] == round(speed.fixed_ms, 1)


def test_the_clusters_of_the_tables_have_both_twins():
    assert {path.stem for path in CATALOGUE} == {"lab_a2000_v100_catalogue", "lab_a16_a16_a2000_catalogue"}


def test_the_predicted_rows_of_the_readme_are_what_the_forecast_gives():
    paces = {"assumed": (Speed(0, 1000 / 333), Speed(0, 1000 / 833))}
    paces["catalogue"] = estimated("RTX A2000"), estimated("Tesla V100-16GB")
    rows = re.findall(r"^\| ([\d,]+) \| (assumed|catalogue) \| (.*) \|$", TABLE, re.MULTILINE)
    assert [row[:2] for row in rows] == [(batch, name) for batch in ("256", "2,048") for name in paces]
    for batch, name, cells in rows:
        assert cells.split(" | ") == row_of(paces[name], int(batch.replace(",", "")))


def row_of(speeds, batch):
    hosts = tuple(HostSpeed(name, (speed,)) for name, speed in zip(("a2000", "v100"), speeds, strict=True))
    costs = NCCL.on_gpus(min(find_card(gpu).gb_per_s for gpu in ("RTX A2000", "Tesla V100-16GB")))
    wire = LinkCosts([Site(host.name, 1, GOODPUT * 2.5e9, GOODPUT * 2.5e9) for host in hosts], costs)
    scene = Scene(Workload(RESNET, batch), hosts, wire)
    every, overlap = LOCAL[batch]
    ways = (*WAYS, (Way("parameter_average", "local", every=every, overlap=overlap), "measured"))
    together = [predict(scene.job, hosts, wire, way, scene.shares(policy)).samples_per_s for way, policy in ways]
    return [f"{speed / sum(scene.alone.values()):.2f}" for speed in (*together, scene.alone["v100"])]
