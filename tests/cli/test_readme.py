"""What README and docs show runs as it stands there, and their links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.quick_python import quick_python

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = """
cluster: readme
defaults: {transport: local, device: cpu, python: PYTHON, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: one, host: localhost, port: 1001, workdir: WORK/one}
  - {name: two, host: localhost, port: 1002, workdir: WORK/two}
"""


def script_of_the_docs(name: str) -> str:
    (script,) = re.findall(rf"```python\n(# {name}\n.*?)```", (ROOT / "docs" / "scripts.md").read_text(), re.DOTALL)
    return script


@pytest.fixture(scope="module")
def orch(tmp_path_factory):
    """orch(*words): what it prints, in a cluster of two local hosts, beside the folder `mine` of the docs' scripts."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "mine").mkdir()
    for name in ("train.py", "mine.py", "saves.py"):
        (folder / "mine" / name).write_text(script_of_the_docs(name))
    inventory = INVENTORY.replace("WORK", str(folder)).replace("PYTHON", quick_python(folder / "quick", trains=True))
    (folder / "readme.yaml").write_text(inventory)

    def run(*words: str) -> str:
        environment = {**os.environ, "ORCH_HOME": str(folder / "home")}
        done = forks.run(forks.ORCH, words, cwd=folder, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("up", "readme.yaml", "--allow-local")
    run.folder = folder
    return run


@pytest.mark.timeout(240)
def test_the_script_of_the_docs_takes_part_in_the_comparison(orch):
    orch("run", "--batch", "97", "--", "mine/train.py")  # odd: the two ranks' shares differ
    summary = json.loads(orch("collect", "--job", "latest", "--json"))
    assert summary["state"] == "succeeded"
    assert summary["world_size"] == 2
    assert summary["samples_total"] == 97 * 50
    assert {node["name"]: node["samples_per_s"] > 0 for node in summary["nodes"]} == {"one": True, "two": True}
    assert summary["loss"] < 60, "the loss of a model that says nothing is the variance of the sum, 64"


@pytest.mark.timeout(240)
def test_a_script_that_imports_the_trainer_is_cut_over_the_hosts_by_a_word(orch):
    orch("run", "--set", "strategy=pipeline", "--set", "accumulate=4", "mine/mine.py")
    summary = json.loads(orch("collect", "--job", "latest", "--json"))
    assert summary["state"] == "succeeded"
    assert summary["samples_total"] == 3 * 4000
    assert summary["accuracy"] > 0.8
    assert len(summary["stages"]) == 2


@pytest.mark.timeout(240)
def test_a_scripts_speed_is_measured_and_what_it_will_do_predicted(orch):
    profile = json.loads(orch("profile", "--set", "profile_s=0.5", "--json", "--", "mine/mine.py"))
    assert profile["batch"] == 96, "as the script says"
    assert [len(block["layers"]) for block in profile["ranks"][0]["network"]] == [1, 1, 1]
    plan = json.loads(orch("plan", "--json", "--", "mine/mine.py"))
    assert (plan["exp"], plan["batch"]) == ("mine.py", 96)
    assert plan["gradient_bytes"] == 4 * (64 * 256 + 256 + 256 * 64 + 64 + 64 * 2 + 2)
    assert plan["pipeline"] and "speed of one, two: from profiles" in plan["basis"]
    line = json.loads(orch("run", "--dry-run", "--json", "--set", "strategy=auto", "--", "mine/mine.py"))
    assert line["prediction"]["samples_per_s"] > 0 and line["settings"]["batch"] == 96
    assert json.loads(line["nodes"][0]["env"]["ORCH_SETTINGS"])["strategy"] == line["settings"]["strategy"]


@pytest.mark.timeout(240)
def test_a_scheduler_and_an_average_of_the_docs_are_stepped_on_every_rank(orch):
    page = (ROOT / "docs" / "scripts.md").read_text()
    blocks = re.findall(r"```python\n((?:scheduler|average) = .*?)```", page, re.DOTALL)
    before, prepare, after = script_of_the_docs("mine.py").partition("Points(4_000))  # <--\n")
    assert len(blocks) == 2 and prepare
    orch.folder.joinpath("mine", "scheduled.py").write_text(
        before + prepare + textwrap.indent("".join(blocks), "    ") + after
    )
    orch("run", "--set", "shares=one=1,two=0", "mine/scheduled.py")
    summary = json.loads(orch("collect", "--job", "latest", "--json"))
    assert summary["state"] == "succeeded" and summary["accuracy"] > 0.8


@pytest.mark.timeout(240)
def test_the_script_that_saves_its_own_checkpoints_goes_on_as_the_docs_say(orch):
    script = ("mine/saves.py", "--resume", "--epochs")
    orch("run", "--", *script, "2")
    orch("run", "--resume", "latest", "--", *script, "3")
    begun = [re.search(r"epoch \d+", orch("logs", "--job", "latest"))[0]]
    orch("run", "--keep", "out/", *script, "4")
    begun += [re.search(r"epoch \d+", orch("logs", "--job", "latest"))[0]]
    assert begun == ["epoch 2", "epoch 3"]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_repository_leads_to_a_page_and_a_heading(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert anchor in {_anchor(heading) for heading in headings}, anchor


def _anchor(heading):
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-")


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_bytes()) <= 8_000
