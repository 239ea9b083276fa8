"""Pipelines over hosts, by real SSH: a stage dies, runs out of time, and a job goes on with other cuts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.lab import lab
from tests.support.terminal import Person

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

INVENTORY = """
cluster: pipeline
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}, ranks: 1}
nodes:
  - {name: alpha, host: 10.77.17.1}
  - {name: beta-2, host: 10.77.17.2}
  - {name: gamma, host: 10.77.17.3}
"""
DISKS = Path("/var/lib/orch-lab")
STAGES = "stages=beta-2:0-9,gamma:10-40,alpha:41-51"
LONG = ["data=synthetic", "samples=600", "batch=8", "accumulate=4", "epochs=50", "eval_every=0", "num_workers=0"]
LONG_ALONE = pytest.mark.skipif(not os.environ.get("ORCH_LONG"), reason="the other two stages: ORCH_LONG=1")


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    with lab(INVENTORY, trains=True) as three:
        someone = Person(three, tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("work"))
        someone.types("up", str(three.inventory))
        yield someone


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def events(person: Person, job: str, event: str) -> list[dict[str, Any]]:
    """Of all ranks, as they lie on the hosts."""
    paths = (DISKS / person.lab.cluster).glob(f"*/home/lab/.orch/jobs/{job}/rank-*/metrics.jsonl")
    lines = [json.loads(line) for path in sorted(paths) for line in path.read_text().split("\n")[:-1]]
    return [line for line in lines if line["event"] == event]


def until(condition: Any, what: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s} s for {what}"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "victim", [pytest.param("beta-2", marks=LONG_ALONE), "gamma", pytest.param("alpha", marks=LONG_ALONE)]
)
def test_a_killed_stage_ends_all_and_is_the_first_cause(person: Person, victim: str) -> None:
    """The neighbours' broken connections are not blamed, however soon they notice."""
    chosen = sets("strategy=pipeline", STAGES, *LONG)
    job = person.types("run", "--detach", "--exp", "resnet152_cifar", *chosen).stdout.strip()
    until(lambda: len(events(person, job, "step")) >= 6, "two updates of each stage", within_s=180)
    (rank,) = person.agent(victim, job)["ranks"].items()
    person.lab.host_exec(victim, ["kill", "-9", str(rank[1]["pid"])], check=True)
    killed_s = time.monotonic()
    until(lambda: person.processes_of(job) == [], "the last process to end", within_s=30)
    print(f"{victim} killed, all ended within {time.monotonic() - killed_s:.1f} s")
    until(lambda: person.job(job)["state"] == "failed", "the verdict", within_s=30)
    first = person.job(job)["first_failure"]
    assert (first["node"], first["rank"], first["signal"]) == (victim, int(rank[0]), "SIGKILL")
    for node in {"alpha", "beta-2", "gamma"} - {victim}:
        assert all(one["secondary"] for one in person.agent(node, job)["failures"])


@LONG_ALONE
def test_a_job_goes_on_with_other_cuts_and_as_ddp(person: Person) -> None:
    brief = ["data=synthetic", "samples=48", "batch=8", "epochs=1", "eval_every=0", "num_workers=0", "lr=0.001"]
    brief += ["checkpoint_every=2"]
    piped = [*brief, "strategy=pipeline", "accumulate=4", STAGES, "steps=2"]
    job = person.asks("run", "--exp", "resnet152_cifar", *sets(*piped))["id"]
    for steps, changed in (
        (4, ["stages=alpha:0-30,beta-2:31-32,gamma:33-51", "in_flight=1"]),
        (6, ["strategy=ddp", "stages=", "in_flight=0", "accumulate=0"]),
    ):
        found = person.asks("run", "--resume", job, *sets(*changed, f"steps={steps}"))
        assert found["state"] == "succeeded"
        said = person.types("logs", "--job", found["id"]).stdout
        assert f"after {steps - 2} updates" in said
        assert {line["step"] for line in events(person, found["id"], "step")} == {steps - 2, steps - 1}
        job = found["id"]


@LONG_ALONE
@pytest.mark.parametrize("how", ["time limit", "cancel"])
def test_a_pipeline_that_has_to_end_leaves_nothing(person: Person, how: str) -> None:
    limit = ["--time-limit", "60s"] if how == "time limit" else []
    chosen = sets("strategy=pipeline", STAGES, *LONG)
    job = person.types("run", "--detach", "--exp", "resnet152_cifar", *chosen, *limit).stdout.strip()
    until(lambda: len(events(person, job, "step")) >= 6, "two updates of each stage", within_s=180)
    if not limit:
        person.types("cancel", "--job", job)
    until(lambda: person.job(job)["state"] != "running", "the verdict", within_s=60)
    until(lambda: person.processes_of(job) == [], "the last process to end", within_s=30)
    print(how, person.job(job))
    assert {line["status"] for line in events(person, job, "end")} == {"interrupted"}
