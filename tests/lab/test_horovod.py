"""`orch run --set strategy=horovod` on two hosts over real SSH: by the real package, and no `horovodrun`.

Skipped where the package is not installed; docs/frameworks.md says how to build it.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.support.watching import events_in
from tests.support.with_packages import Person, person_with_packages

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not importlib.util.find_spec("horovod"), reason="needs the package horovod (docs/frameworks.md)"
    ),
]

INVENTORY = """
cluster: horovod
defaults: {{device: cpu, bandwidth: 2.5Gbps, python: {python}, env: {{OMP_NUM_THREADS: "1"}}}}
nodes:
  - {{name: alpha, host: 10.77.34.1, ranks: 1}}
  - {{name: beta, host: 10.77.34.2, ranks: 2}}
"""
HOSTS = {"alpha": "10.77.34.1", "beta": "10.77.34.2"}
STEPS = 6
SETTINGS = {"data": "synthetic", "steps": STEPS, "batch": 32, "shares": "alpha=4,beta=5", "eval_every": 0}


@pytest.fixture(scope="module")
def person(tmp_path_factory):
    with person_with_packages(INVENTORY, tmp_path_factory) as someone:
        yield someone


def ran(person: Person, strategy: str, *options: str) -> Path:
    """The folder of a collected run."""
    words = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    person.types("run", "--exp", "mnist_lenet", *words, "--set", f"strategy={strategy}", *options)
    job = person.asks("jobs")["jobs"][0]["id"]
    person.types("collect", "--job", job, "--out", str(person.folder / "runs"))
    return person.folder / "runs" / job


def losses(run: Path) -> list[list[float]]:
    """Of each rank."""
    folders = sorted(run.glob("nodes/*/rank-*"))
    return [[event["loss"] for event in events_in(folder) if event["event"] == "step"] for folder in folders]


def said(rank: Path) -> str:
    return "".join(log.read_text() for log in rank.glob("std*.log"))


def test_two_hosts_with_unequal_shares_train_as_with_another_exact_strategy(person):
    run = ran(person, "horovod")
    found, expected = losses(run), losses(ran(person, "allreduce"))
    assert [len(one) for one in found] == [STEPS] * 3
    for own, other in zip(found, expected, strict=True):
        assert own == pytest.approx(other, rel=1e-5)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["state"], summary["missing"]) == ("succeeded", [])
    assert summary["settings"]["strategy"] == "horovod"
    assert [(node["name"], node["ranks"]) for node in summary["nodes"]] == [("alpha", 1), ("beta", 2)]
    assert not [rank for rank in run.glob("nodes/*/rank-*") if "horovod/common" in said(rank)]


def test_every_connection_is_made_at_the_training_address(person):
    """A host's own name leads to its loopback there."""
    run = ran(person, "horovod", "--env", "HOROVOD_LOG_LEVEL=debug")
    for name, address in HOSTS.items():
        for rank in run.glob(f"nodes/{name}/rank-*"):
            listened = re.findall(r"rendezvous started .* addr=\[(.*?)\]", said(rank))
            assert len(listened) >= 6
            assert set(listened) == {address}


def test_the_study_runs_its_row_where_up_has_found_the_package(person):
    words = ("--rows", "horovod", "--repeats", "1", "--set", "steps=5", "--set", "batch=4", "--set", "warmup_steps=1")
    person.types("study", "ways_to_start", *words, "--out", str(person.folder / "study"), timeout_s=500)
    (row,) = json.loads(next((person.folder / "study").glob("study-*.json")).read_text())["rows"].values()
    assert row["runs"][0]["figures"]["samples_per_s"] > 0
