"""Scripts of Lightning, Accelerate and Hugging Face's Trainer, from their real packages, on two hosts over real SSH:
unchanged, and with the callbacks of `trainer.integrations`.

Skipped where the packages of the extra `frameworks` are missing.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.watching import SCRIPTS, TOLD, events_in, unchanged
from tests.support.with_packages import Person, person_with_packages

MISSING = [package for package in ("lightning", "accelerate", "transformers") if not importlib.util.find_spec(package)]
pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install -e '.[frameworks]'"),
]

INVENTORY = """
cluster: frameworks
defaults: {{device: cpu, bandwidth: 2.5Gbps, python: {python}, env: {{OMP_NUM_THREADS: "1"}}}}
nodes:
  - {{name: alpha, host: 10.77.32.1}}
  - {{name: beta, host: 10.77.32.2}}
"""
RANKS = 2
STEPS = 20
"""Of each script on two ranks."""


@pytest.fixture(scope="module")
def person(tmp_path_factory):
    with person_with_packages(INVENTORY, tmp_path_factory) as someone:
        yield someone


def ran(person: Person, name: str, text: str, *options: str, beside: Path | None = None, exit_code: int = 0) -> Path:
    """The folder of a collected run. beside: a file that the script imports."""
    folder = person.folder / name
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    if beside:
        shutil.copy(beside, folder)
    person.types("run", *options, "--", f"{name}/{name}.py", exit_code=exit_code)
    job = person.asks("jobs")["jobs"][0]["id"]
    print(person.types("collect", "--job", job, "--out", str(person.folder / "runs")).stdout)
    return person.folder / "runs" / job


def said(run: Path) -> list[str]:
    return [log.read_text() for log in sorted(run.glob("nodes/*/rank-*/stdout.log"))]


def ranks_in(run: Path) -> list[int]:
    """How many ranks each one says that it trained with."""
    return [int(re.search(r"ranks (\d+)", text)[1]) for text in said(run)]


def assert_trained_together(run: Path) -> None:
    """Alone each rank would take twice as many steps; its weights could be the same, as it is given the same seed."""
    weights = [re.search(r"weights (\S+)", text)[1] for text in said(run)]
    assert len(weights) == RANKS
    assert len(set(weights)) == 1
    for folder in run.glob("nodes/*/rank-*"):
        assert [event["step"] for event in events_in(folder) if event["event"] == "step"] == list(range(STEPS))


@pytest.mark.parametrize(
    ("name", "model", "batch"),
    [("light", "Judge", 16), ("accel", "Sequential", 16), ("hf", "GPT2LMHeadModel", 8)],
)
def test_an_unchanged_script_trains_over_both_hosts_and_enters_the_comparison(person, name, model, batch):
    run = ran(person, name, unchanged(name))
    assert_trained_together(run)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["model"], summary["samples_from"], summary["missing"]) == (model, "loader", [])
    assert summary["samples_per_s"] > 0
    for node in summary["nodes"]:
        assert (node["batch_per_rank"], node["backend"]) == (batch, "gloo")
        assert all(node[f"{part}_ms"] is not None for part in ("load", "compute", "sync", "wait", "optim"))


def test_lightning_trains_each_rank_by_itself_where_it_is_not_told_of_the_hosts(person):
    told = 'num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), '
    assert told in unchanged("light")
    run = ran(person, "light", unchanged("light").replace(told, ""))
    assert ranks_in(run) == [1] * RANKS
    assert "Each rank trained by itself" in (run / "summary.json").read_text()


def test_lightning_refuses_another_number_of_ranks_than_its_devices(person):
    text = unchanged("light").replace('devices="auto"', "devices=2")
    run = ran(person, "light", text, exit_code=None)
    errors = [log.read_text() for log in run.glob("nodes/*/rank-*/stderr.log")]
    assert any("num_nodes" in text and "ValueError" in text for text in errors), errors


def test_accelerate_trains_each_rank_by_itself_on_cpus_without_the_variable_that_orch_sets(person):
    run = ran(person, "accel", unchanged("accel"), "--env", "ACCELERATE_USE_CPU=false")
    assert ranks_in(run) == [1] * RANKS


def test_hugging_faces_trainer_needs_no_setting_on_cpus(person):
    settings = 'use_cpu=True, ddp_backend="gloo", '
    assert settings in unchanged("hf")
    run = ran(person, "hf", unchanged("hf").replace(settings, ""))
    assert_trained_together(run)


# ---- with a callback ------------------------------------------------------------------------------------------------


def counted(run: Path) -> list[tuple[list[dict], list[int], list[float], float]]:
    """Of each rank its records; what its script itself counted: samples of each batch, losses, the last accuracy."""
    found = []
    for folder in sorted(run.glob("nodes/*/rank-*")):
        line = next(line for line in (folder / "stdout.log").read_text().splitlines() if line.startswith("COUNTED"))
        found.append((events_in(folder), *map(ast.literal_eval, re.split("COUNTED|LOSSES|ACCURACY", line)[1:])))
    return found


def in_updates(batches: list[float], accumulated: int) -> list[float]:
    """Sums over so many batches, or fewer at the end of one of the two epochs."""
    half = len(batches) // 2
    return [
        sum(epoch[i : i + accumulated])
        for epoch in (batches[:half], batches[half:])
        for i in range(0, half, accumulated)
    ]


@pytest.mark.parametrize(
    ("name", "accumulated", "samples_from"), [("light", 2, "framework"), ("accel", 1, "loader"), ("hf", 2, "framework")]
)
def test_what_a_callback_tells_stands_in_the_same_records_once(person, name, accumulated, samples_from):
    script = f"{name}_told"
    run = ran(person, script, (TOLD / f"{script}.py").read_text(), beside=SCRIPTS / f"{name}.py")
    summary = json.loads((run / "summary.json").read_text())
    total = 0
    for events, batches, losses, accuracy in counted(run):
        steps = [event for event in events if event["event"] == "step"]
        samples = in_updates(batches, accumulated)
        assert [step["step"] for step in steps] == list(range(len(samples)))
        assert [step["samples"] for step in steps] == samples
        assert summary["accuracy"] == pytest.approx(accuracy)
        total += sum(samples)
        if name == "accel" and events[0]["rank"] > 0:  # Accelerate logs on its main process alone
            assert not any("loss" in step or "epoch" in step for step in steps)
            continue
        assert [step["epoch"] for step in steps] == sorted([0, 1] * (len(steps) // 2))
        if name == "light":  # each rank its own
            sums = [loss * batch for loss, batch in zip(losses, batches, strict=True)]
            assert [step["loss"] for step in steps] == pytest.approx(in_updates(sums, accumulated))
        else:  # the mean over the ranks, of hf also over the updates since it logged last
            assert [step["loss"] / step["samples"] for step in steps if "loss" in step] == pytest.approx(losses)
        assert events[0].get("steps") == (None if name == "accel" else len(steps))
    assert (summary["samples_total"], summary["samples_from"], summary["missing"]) == (total, samples_from, [])
    assert all(point["accuracy"] and point["loss"] for point in summary["curves"]["evaluations"])
    assert len(summary["curves"]["evaluations"]) == 2 < len(summary["curves"]["loss"])
    assert summary["loss"] > 0
    page = (run / "report.html").read_text()
    assert 'aria-label="loss over updates"' in page and 'aria-label="test accuracy over updates"' in page


def test_a_callback_says_nothing_where_nothing_is_measured(person):
    text = (TOLD / "accel_told.py").read_text()
    run = ran(person, "accel_told", text, "--no-metrics", beside=SCRIPTS / "accel.py")
    assert all("COUNTED" in text for text in said(run))
    assert not list(run.glob("nodes/*/rank-*/metrics.jsonl"))
