"""`orch init`: an inventory out of other forms of hosts."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from orchestrator.hosts import load_inventory
from tests.support import forks

DATA = Path(__file__).parents[1] / "data" / "inventories"


@pytest.fixture
def types(tmp_path, monkeypatch):
    """Types a command in an empty folder, with an SSH configuration of its own; gives both outputs."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host gpu1\n HostName 10.0.0.1\n User me\nHost other\n")
    env = {**os.environ, "HOME": str(tmp_path), "COLUMNS": "200"}
    env.pop("ORCH_SSH_CONFIG", None)

    def run(*words, code=0):
        done = forks.run(forks.ORCH, words, cwd=tmp_path / "here", env=env)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    run.here = tmp_path / "here"
    return run


def test_an_inventory_to_fill_in_is_one(types):
    out, err = types("init", "--user", "1e3")
    assert out == "rack.yaml: to fill in; then `orch up rack.yaml`\n" and not err
    found = load_inventory(types.here / "rack.yaml")
    assert (found.cluster, [node.user for node in found.nodes]) == ("rack", ["1e3", "1e3"])
    assert stat.S_IMODE((types.here / "rack.yaml").stat().st_mode) == 0o600


def test_hosts_of_a_hostfile_have_the_user_that_is_given(types):
    out, err = types("init", "--from", "hostfile", str(DATA / "open_mpi_hostfile"), "--user", "me", "lab.yaml")
    assert out == "lab.yaml: 4 hosts; then `orch up lab.yaml`\n"
    assert err.splitlines()[0].endswith("open_mpi_hostfile:3: max-slots is not carried over")
    found = load_inventory(types.here / "lab.yaml")
    assert (found.cluster, [node.user for node in found.nodes]) == ("lab", ["me", "me", "me", "trainer"])


def test_what_all_hosts_have_goes_into_defaults_and_a_comment_says_where_from(types):
    (types.here / "hosts").write_text("a slots=4\nb slots=4\n")
    out, _ = types("init", "--from", "hostfile", "hosts", "--user", "yes", "--cluster", "mine", "-")
    assert out == (
        "# Written by `orch init` from the file hosts: 2 hosts.\ncluster: mine\n# Common to both.\n"
        'defaults: {user: "yes", ranks: 4}\nnodes:\n  - {name: a, host: a}\n  - {name: b, host: b}\n'
    )
    assert list(types.here.iterdir()) == [types.here / "hosts"]


def test_hosts_of_the_ssh_configuration(types):
    out, _ = types("init", "--from", "ssh-config", "gpu*", "-")
    assert out.splitlines()[-1] == "  - {name: gpu1, host: 10.0.0.1, user: me}"
    assert "no node of" in types("init", "--from", "ssh-config", "x*", "-", code=2)[1]


def test_a_file_that_is_there_stays_unless_forced(types):
    for name, target in (("rack.yaml", None), ("dangling", "nowhere")):
        (types.here / name).symlink_to(target) if target else (types.here / name).write_text("mine")
        _, err = types("init", name, code=2)
        assert f"error: {name} already exists" in err and "--force" in err
    assert (types.here / "rack.yaml").read_text() == "mine"
    types("init", "--force")
    assert load_inventory(types.here / "rack.yaml").cluster == "rack"


def test_mistakes_come_all_at_once_and_nothing_is_written(types):
    (types.here / "hosts").write_text("a slots=x\nb:1\nc frobs=1\nme:x\n")
    out, err = types("init", "--from", "hostfile", "hosts", code=2)
    assert (out, [line.split(" ")[1] for line in err.splitlines()]) == ("", ["hosts:1:", "hosts:3:", "hosts:4:"])
    assert not (types.here / "rack.yaml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--from", "slurm"), "Option '--from' requires 2 arguments"),
        (("--from", "slurm", "-x@y", "-"), "--from slurm: '-x' must be a login name"),
        (("--user", "no one"), "--user: 'no one' must be a login name"),
        (("--cluster", ""), "--cluster: '' must be letters"),
        (
            ("--from", "hostfile", "none"),
            "none: cannot be read (No such file or directory); give the path of a hostfile",
        ),
        (("--from", "ansible", "none"), "none: no such file"),
        (("--from", "ssh-config", ""), "names no host"),
    ],
)
def test_what_cannot_be_is_refused(words, said, types):
    assert said in types("init", *words, code=2)[1]


def test_a_command_of_earlier_versions_names_what_takes_its_place(types):
    assert "`orch cp` is no longer a command\n  try: `orch ssh-config" in types("cp", "a", "v100:", code=2)[1]
    assert "is no longer a command\n  try: `orch ssh-config" in types("inventory", "export", code=2)[1]
