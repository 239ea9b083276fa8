"""Every command that README and docs show works as it stands there, on a cluster of two hosts that are this machine.

`orch run` is asked for its plan (`--dry-run`), since a training takes minutes. What measures or changes hosts is read
as the command line would read it, and not carried out; other tests do that.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import click
import pytest

from orchestrator.cli import main
from tests.support import forks
from tests.support.quick_python import quick_python

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
INVENTORY = """
cluster: rack
defaults: {transport: local, device: cpu, python: PYTHON}
nodes:
  - {name: a2000, host: localhost, port: 1001, workdir: WORK/one, bandwidth: 2.5Gbps, paced: {samples_per_s: 333}}
  - {name: v100, host: localhost, port: 1002, workdir: WORK/two, bandwidth: 2.5Gbps, paced: {samples_per_s: 833}}
"""
ONLY_READ = {"doctor", "profile", "study", "sweep", "setup", "data", "trust", "down", "reap", "use"}
ONLY_READ |= {"forward", "cancel", "pull", "logs", "why", "collect", "report", "compare", "top", "ui"}
"""They measure for long, change hosts, or need a job that has run."""


def shown(page: Path) -> list[str]:
    """The `orch` lines of its blocks of shell, and those within its sentences that have a word after the command."""
    text = page.read_text()
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    lines = [line.partition(" -- ")[2] if "lab.py exec" in line else line for line in blocks.splitlines()]
    typed = [re.sub(r"^\S*/orch ", "orch ", line) for line in lines]
    spoken = [line for line in re.findall(r"`(orch [^`]+)`", text) if not re.search(r"[A-Z]{4}|\.\.\.", line)]
    whole = [line for line in spoken if line.count(" ") > 1]  # `orch plan` within a sentence is a name
    return [
        line.partition(" #")[0].partition(" > ")[0].rstrip() for line in (*typed, *whole) if line.startswith("orch ")
    ]


COMMANDS = sorted({line for page in PAGES for line in shown(page)})


def words_of(line: str) -> list[str]:
    return shlex.split(line)[1:]


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_line_understands_it(line, tmp_path, monkeypatch):
    monkeypatch.chdir(workplace(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    name, *words = words_of(line)
    group = main.commands[name]
    while isinstance(group, click.Group) and words:
        name, *words = words
        group = group.commands[name]
    group.make_context(name, words, parent=click.Context(main, info_name="orch", **main.context_settings))


def workplace(folder: Path, python: str = sys.executable) -> Path:
    """A folder with the files that the docs speak of."""
    files = {"rack.yaml": INVENTORY.replace("WORK", str(folder)).replace("PYTHON", python), ".env": "A=b\n"}
    files |= {
        name: "print('hi')\n"
        for name in ("train.py", "old.py", "scripts/train.py", "mypackage/train.py", "mine.py", "saves.py")
    }
    files |= {"hostfile": "a slots=4\n", "hosts.ini": "[rack]\na\nb\n", "../.ssh/config": "Host gpu01 v100\n"}
    files |= {"job.yaml": "# A job of orch 0.1.0\nscript: train.py\n"}
    files |= {
        "requirements.txt": "tqdm\n",
        "job.sh": "echo hi\n",
        "mypackage/__init__.py": "",
        "inventory/lab_pair.yaml": "",
        "data/x": "",
    }
    for name, text in files.items():
        (folder / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "work" / name).write_text(text)
    for path in (ROOT / "inventory").glob("*.yaml"):
        (folder / "work" / "inventory" / path.name).write_text(path.read_text())
    return folder / "work"


@pytest.fixture(scope="module")
def rack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rack")
    place = workplace(folder, quick_python(tmp_path_factory.mktemp("python")))
    environment = {**os.environ, "ORCH_HOME": str(folder / "home"), "HOME": str(folder), "HF_TOKEN": "hf_x"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ansible-inventory's
    assert forks.run(forks.ORCH, ["up", "rack.yaml", "--allow-local"], cwd=place, env=environment).returncode == 0
    return place, environment


def carried_out(line: str) -> list[str] | None:
    """Its words as they are tried; None for what is only read."""
    name, *words = words_of(line)
    if name in ONLY_READ or "lab_" in line or words[:1] == ["add"] or "--resume" in line or "--json" in line:
        return None
    if words[-1:] == ["mine.py"] and (name == "plan" or "strategy=auto" in words):
        return None  # it has to be profiled before: test_readme.py does both
    if name == "run" and not any(word in ("--exp", "-m") or word.endswith((".py", ".yaml")) for word in words):
        return None
    return [name, *(["--dry-run"] if name == "run" and "--dry-run" not in words else []), *words]


TRIED = [line for line in COMMANDS if carried_out(line)]


def test_most_are_carried_out():
    assert {words_of(line)[0] for line in TRIED} >= {"up", "run", "plan", "jobs"}


@pytest.mark.parametrize("line", TRIED)
def test_it_does_what_it_says(line, rack):
    place, environment = rack
    done = forks.run(forks.ORCH, carried_out(line), cwd=place, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
