"""The pages under docs/reference are what the code says today, and name every command, key and setting."""

import importlib.util
import re
from pathlib import Path

import click
import pytest

from orchestrator.cli import SECTIONS, main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_code_says(reference):
    old = [path for path, text in reference.pages().items() if (ROOT / path).read_text(encoding="utf-8") != text]
    assert not old, "run `make docs`"


def test_every_command_has_a_page_and_an_example(reference):
    page = reference.commands()
    shown = re.findall(r"^### (orch .*)$", page, flags=re.M)
    assert {name for name in shown if name.count(" ") == 1} == {f"orch {name}" for name in main.commands}
    assert set(main.commands) == {command.name for members in SECTIONS.values() for command in members}
    for name, part in zip(shown, re.split(r"^### orch .*$", page, flags=re.M)[1:], strict=True):
        command = main.commands[name.split()[1]]
        if not isinstance(command, click.Group):
            assert re.search(rf"^\s+{name}\b", part, flags=re.M), f"{name} shows no example"


def test_a_new_option_turns_the_page_old(reference):
    command = main.commands["status"]
    before = dict(reference.helps(command, "orch"))["orch status"]
    added = click.Command(
        command.name, params=[*command.params, click.Option(["--colour"], help="New.")], help=command.help
    )
    assert "--colour" not in before
    assert "--colour" in dict(reference.helps(added, "orch"))["orch status"]
