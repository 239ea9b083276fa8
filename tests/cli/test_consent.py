"""What an inventory runs on this very machine is allowed value by value: each change is asked about again."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import astuple

import pytest

from orchestrator.hosts import load_inventory, local_commands
from tests.support import forks
from tests.support.quick_python import quick_python

FILE = """\
cluster: desk
defaults: {transport: local, device: cpu, python: PYTHON, note: mine}
nodes:
  - name: a
    host: localhost
    workdir: FOLDER/w
    prepare: "true"
    activate: "true"
    env: {TOKEN: one, LD_LIBRARY_PATH: /one}
"""
SCRIPT = "import os\nprint('TOKEN is', os.environ.get('TOKEN'))\n"
CHANGES = {
    "prepare": ('prepare: "true"', 'prepare: "touch FOLDER/planted"'),
    "activate": ('activate: "true"', 'activate: "touch FOLDER/planted"'),
    "env TOKEN": ("TOKEN: one", "TOKEN: two"),
    "env LD_LIBRARY_PATH": ("LD_LIBRARY_PATH: /one", "LD_LIBRARY_PATH: /two"),
    "env LD_PRELOAD": ("TOKEN: one", "TOKEN: one, LD_PRELOAD: /tmp/planted.so"),
}


class Desk:
    def __init__(self, folder):
        self.folder, self.file, self.planted = folder, folder / "desk.yaml", folder / "planted"
        self.write(FILE.replace("PYTHON", quick_python(folder / "quick")))
        (folder / "hi.py").write_text(SCRIPT)

    def write(self, text):
        self.file.write_text(text.replace("FOLDER", str(self.folder)))

    def change(self, old, new):
        text = self.file.read_text()
        assert old in text
        self.write(text.replace(old, new))

    def types(self, *words):
        env = {**os.environ, "ORCH_HOME": str(self.folder / "home"), "COLUMNS": "400"}
        done = forks.run(forks.ORCH, words, env=env, cwd=self.folder)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return Desk(tmp_path_factory.mktemp("desk"))


@pytest.mark.parametrize("key", CHANGES)
def test_a_changed_value_is_asked_about_before_anything_of_it_runs(desk, key):
    allowed = desk.file.read_text()
    assert desk.types("up", "desk.yaml", "--allow-local")[0] == 0
    assert desk.types("run", "--dry-run", "--", "hi.py")[0] == 0
    desk.change(*CHANGES[key])
    for words in (["run", "--", "hi.py"], ["run", "--dry-run", "--", "hi.py"], ["setup"], ["up", "desk.yaml"]):
        code, said = desk.types(*words)
        assert code == 2 and f"a: {key}" in said, (words, said)
        assert words[0] == "up" or "`orch up" in said
    assert not desk.planted.exists()
    desk.write(allowed)  # what was allowed once needs no second word
    assert desk.types("up", "desk.yaml")[0] == 0
    assert desk.types("run", "--dry-run", "--", "hi.py")[0] == 0


def test_a_node_that_was_added_is_asked_about_when_the_defaults_change(desk):
    assert desk.types("up", "desk.yaml", "--allow-local")[0] == 0
    assert desk.types("node", "add", "b", "host=127.0.0.2", f"workdir={desk.folder}/b", "--allow-local")[0] == 0
    desk.change("note: mine", "activate: touch FOLDER/planted")
    for words in (["run", "--nodes", "b", "--", "hi.py"], ["up", "desk.yaml"]):
        code, said = desk.types(*words)
        assert code == 2 and "b: activate" in said, (words, said)
    assert not desk.planted.exists()


def test_consent_keeps_no_value_that_could_be_guessed_from_it(desk):
    """A plain digest of a short secret would be as good as the secret."""
    assert desk.types("up", "desk.yaml", "--allow-local")[0] == 0
    commands = local_commands(load_inventory(desk.file).nodes)
    kept = [*(desk.folder / "home/allowed").iterdir()]
    plain = hashlib.sha256(json.dumps([astuple(command) for command in commands]).encode()).hexdigest()
    assert kept and plain not in [path.name for path in kept]
    assert not [path for path in kept if "one" in path.read_text()]
