"""`orch node add`: what it takes from the inventory's defaults, and what it leaves as it was."""

import json

import pytest

from orchestrator.cli import main
from orchestrator.errors import UsageError
from orchestrator.hosts import load_inventory, node_with_defaults, with_secrets
from orchestrator.paths import Home
from orchestrator.store import Store
from tests.support.quick_python import quick_python

FILE = """\
cluster: pair
defaults: {transport: local, device: cpu, python: %s, workdir: %s, note: of all, env: {TOKEN_OF_MINE: s3cret}}
nodes:
  - {name: a, note: mine}
"""


@pytest.fixture(autouse=True)
def a_terminal_that_nobody_reads(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return quick_python(tmp_path_factory.mktemp("python") / "quick")


@pytest.fixture
def rack(tmp_path, monkeypatch, capfd, python):
    """The inventory file, and `orch` in this process: its exit code, output and errors."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    file = tmp_path / "pair.yaml"
    file.write_text(FILE % (python, tmp_path / "w"))

    def orch(*words):
        with pytest.raises(SystemExit) as ended:
            main([*words], standalone_mode=True)
        return (ended.value.code or 0, *capfd.readouterr())

    assert orch("up", str(file), "--allow-local")[0] in (0, 3)  # a torch is not needed here
    return file, orch


def remembered():
    return Store(Home.default()).cluster()


def test_a_node_has_what_it_does_not_say_from_the_defaults(rack):
    file, orch = rack
    code, _, err = orch("node", "add", "b", "gpu=A16", "--allow-local")
    assert code in (0, 3), err
    assert f"transport, device, python, workdir, note, env: from the defaults of {file}" in err
    node = remembered().node("b")
    assert (node.transport, node.gpu, node.note) == ("local", "A16", "of all")
    assert node.env == {"TOKEN_OF_MINE": "***"}  # what is kept here holds no secret
    assert "s3cret" not in Home.default().cluster("pair").read_text()
    (filled,) = with_secrets(Home.default(), remembered(), [node])
    assert filled.env == {"TOKEN_OF_MINE": "s3cret"}
    # The file has the last word, also about a node that it does not have.
    file.write_text(file.read_text().replace("of all", "changed").replace("{TOKEN_OF_MINE: s3cret}", "{OTHER: x}"))
    assert orch("up", str(file), "--allow-local")[0] in (0, 3)
    assert (remembered().node("b").note, remembered().node("b").gpu) == ("changed", "A16")
    assert with_secrets(Home.default(), remembered(), [remembered().node("b")])[0].env == {"OTHER": "x"}


def test_the_defaults_of_the_last_up_serve_where_the_file_has_gone(rack, python):
    file, _ = rack
    file.unlink()
    node, words = node_with_defaults(remembered(), {"name": "b", "note": "n"})
    assert (node.transport, node.device, node.note, node.python) == ("local", "cpu", "n", python)
    assert words.endswith(f"from the defaults of the last `orch up` ({file} cannot be used now)")
    with pytest.raises(UsageError):
        with_secrets(Home.default(), remembered(), [node])


def test_a_host_that_cannot_be_reached_is_not_added(rack):
    file, orch = rack
    before = Home.default().cluster("pair").read_text()
    code, out, err = orch("node", "add", "far", "transport=ssh", "host=127.0.0.1", "port=1", "user=me")
    assert (code, out) == (3, "")
    assert "error: far: nothing listens at 127.0.0.1:1" in err and "; far was not added" in err
    assert Home.default().cluster("pair").read_text() == before
    assert load_inventory(file).defaults["note"] == "of all"


def test_what_the_defaults_would_run_here_is_asked_about_first(rack):
    _, orch = rack
    code, _, err = orch("node", "add", "b")
    assert code == 2 and "b: env TOKEN_OF_MINE" in err and "nothing of it was run" in err
    assert [node.name for node in remembered().nodes] == ["a"]
    code, _, err = orch("node", "add", "b", "prepare=touch x")
    assert code == 2 and "orch does not store a `prepare`" in err
    assert json.loads(Home.default().cluster("pair").read_text())["extra_keys"] == {}


def test_a_removed_host_of_the_file_comes_back_without_keys(rack):
    file, orch = rack
    assert orch("node", "add", "b", "gpu=A16", "--allow-local")[0] in (0, 3)
    assert orch("node", "remove", "a")[0] == 0
    code, _, err = orch("node", "add", "a", "--allow-local")
    assert code in (0, 3) and f"a is as in {file}" in err
    assert remembered().node("a").note == "mine" and remembered().removed == ()
