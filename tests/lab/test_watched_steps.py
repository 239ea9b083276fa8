"""Training scripts that nobody changed, on two hosts over real SSH: the comparison has their steps."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.support.lab import lab
from tests.support.terminal import Person
from tests.support.watching import PARTS, Measured, by_hand, unchanged

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

INVENTORY = """
cluster: watched
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.31.1}
  - {name: beta, host: 10.77.31.2}
"""
TRIES = 3
EACH = tuple((part,) for part in PARTS)
HF = (("load",), ("compute",), ("exposed", "optim"))
"""Its callbacks cannot tell apart what is behind the last gradient."""
hf = pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs the package transformers")


@pytest.fixture(scope="module")
def person(tmp_path_factory):
    with lab(INVENTORY, torchrun=True) as pair:
        someone = Person(pair, tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("work"))
        someone.types("up", str(pair.inventory))
        yield someone


def ran(person: Person, name: str, text: str, *options: str):
    """The folder of a collected run."""
    folder = person.folder / name
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    person.types("run", *options, "--", f"{name}/{name}.py")
    job = person.asks("jobs")["jobs"][0]["id"]
    person.types("collect", "--job", job, "--out", str(person.folder / "runs"))
    return person.folder / "runs" / job


@pytest.mark.parametrize(
    ("name", "model", "samples_from", "batch", "parts"),
    [
        ("cnn", "Sequential", "loader", 16, EACH),
        ("gpt", "GPT", "network", 12, EACH),
        pytest.param("hf", "GPT2LMHeadModel", "loader", 8, HF, marks=hf),
    ],
)
def test_the_comparison_has_each_part_of_a_step_as_the_script_times_it(person, name, model, samples_from, batch, parts):
    for _ in range(TRIES):  # the hosts of a lab share their cores with all that this machine does
        run = ran(person, name, by_hand(name))
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["model"], summary["samples_from"], summary["missing"]) == (model, samples_from, [])
        assert summary["samples_per_s"] > 0
        for node in summary["nodes"]:
            assert (node["batch_per_rank"], node["backend"]) == (batch, "gloo")
            assert all(node[f"{part}_ms"] is not None for part in ("load", "compute", "sync", "wait", "optim"))
        found = [Measured.read(folder) for folder in sorted(run.glob("nodes/*/rank-*"))]
        assert len(found) == 2
        for one in found:
            print(name, {"+".join(names): one.means_ms(names) for names in (*parts, PARTS)})
        misses = [one.misses(parts) for one in found]
        if not any(misses):
            return
    raise AssertionError(misses)


def test_no_metrics_leaves_a_script_alone_and_it_computes_the_same(person):
    seen, plain = (ran(person, "cnn", unchanged("cnn"), *options) for options in ((), ("--no-metrics",)))
    assert said(seen) == said(plain) != {}
    assert all("weights" in text for text in said(plain).values() if text)
    assert len(list(seen.glob("nodes/*/rank-*/metrics.jsonl"))) == 2
    assert not list(plain.glob("nodes/*/rank-*/metrics.jsonl"))
    missing = json.loads((plain / "summary.json").read_text())["missing"]
    assert any("No rank has metrics" in sentence for sentence in missing)


def said(run: Path) -> dict[str, str]:
    """What each rank printed, less the times of day in torch's own warnings."""
    logs = run.glob("nodes/*/rank-*/std*.log")
    return {f"{log.parent.name}/{log.name}": re.sub(r"(?m)^\[W.*\n", "", log.read_text()) for log in logs}
