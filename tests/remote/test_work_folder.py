"""Which folders may be work folders: none that others could write into or replace; and whose commands run here."""

import os
import stat
import sys
from pathlib import Path

import pytest

from orchestrator.hosts import load_inventory, local_commands
from orchestrator.remote import claim
from orchestrator.remote.answer import Refused
from orchestrator.remote.layout import WorkFolder
from orchestrator.remote.workfolder import content, danger, trial
from tests.support import forks


def made(path, mode=0o700, owner=None):
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, owner)
    return path


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes folders of another user")


def test_a_folder_that_every_user_may_write_is_refused_with_the_line_that_closes_it(tmp_path):
    work = made(tmp_path / "work", 0o777)
    problem, remedy = danger(work)
    assert "mode 0777" in problem
    assert f"`chmod go-w {work}`" in remedy
    assert trial(str(work))["workdir_unfit"] == (problem, remedy)
    with pytest.raises(Refused, match="may be written by every user"), claim.claimed(WorkFolder(str(work))):
        pass
    assert list(work.iterdir()) == []
    work.chmod(0o700)
    assert danger(work) is None


@pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o775, True), (0o1777, False), (0o755, False)])
def test_a_folder_above_it_that_others_may_write_is_one_too_unless_it_is_sticky(tmp_path, mode, refused):
    above = made(tmp_path / "above", mode)
    if mode == 0o775:
        os.chown(above, -1, 1)  # daemon's group
    made(above / "work")
    found = danger(above / "work")
    assert (found is not None) == refused
    assert not refused or str(above) in found[0]
    assert (danger(above / "not-yet") is not None) == refused


@needs_root
def test_a_folder_of_somebody_else_or_reached_by_their_link_is_refused(tmp_path):
    theirs, mine, open_place = (
        made(tmp_path / "theirs", owner=65534),
        made(tmp_path / "mine"),
        made(tmp_path / "tmp", 0o1777),
    )
    assert "belongs to nobody" in danger(theirs)[0]
    assert "belongs to nobody" in danger(theirs / "work")[0]
    link = open_place / "work"
    link.symlink_to(mine)
    assert danger(link) is None
    os.lchown(link, 65534, 65534)
    assert "belongs to nobody" in danger(link)[0]


def test_a_link_leads_to_what_is_judged(tmp_path):
    target = made(tmp_path / "open", 0o777)
    (tmp_path / "link").symlink_to(target)
    assert str(target) in danger(tmp_path / "link")[0]


@pytest.mark.parametrize("called", ["urandom", "statvfs"])
def test_a_probe_beside_it_that_removes_its_folder_makes_none_unusable(tmp_path, monkeypatch, called):
    """Hosts that share a home are probed at the same time: each removes the folder again that it had made."""
    root, times = tmp_path / "home" / ".orch", [3]
    root.mkdir(parents=True)
    call = getattr(os, called)  # just before it writes there, or asks how much is free

    def removed_before(*words):
        if times[0] and root.is_dir():
            times[0] -= 1
            root.rmdir()
            root.parent.rmdir()
        return call(*words)

    monkeypatch.setattr(os, called, removed_before)
    found = trial(str(root))
    assert found["workdir_error"] is None and found["workdir_unfit"] is None and found["disk_free_bytes"] > 0
    assert not root.parent.exists()


def test_a_group_with_no_other_member_is_no_danger(tmp_path, monkeypatch):
    work = made(tmp_path / "work", 0o770)
    os.chown(work, -1, os.getgid())
    assert danger(work) is None
    assert stat.S_IMODE(work.stat().st_mode) == 0o770


def test_a_mark_of_another_kind_marks_nothing(tmp_path):
    (tmp_path / ".orch-work").symlink_to(tmp_path / "elsewhere")
    assert content(tmp_path) == "other"
    (tmp_path / ".orch-work").unlink()
    (tmp_path / ".orch-work").mkdir()
    assert content(tmp_path) == "other"


# ---- a stranger's inventory -----------------------------------------------------------------------------------


def up(tmp_path, *options, **keys):
    more = "".join(f", {key}: {value}" for key, value in {"python": sys.executable, **keys}.items())
    node = f"{{name: a, host: 127.0.0.1, device: cpu, transport: local, workdir: {tmp_path}/work{more}}}"
    (tmp_path / "rack.yaml").write_text(f"cluster: rack\nnodes:\n  - {node}\n")
    env = {**os.environ, "ORCH_HOME": str(tmp_path / "home")}
    return forks.run(forks.ORCH, ["up", str(tmp_path / "rack.yaml"), *options], env=env)


def test_a_strangers_inventory_runs_nothing_here_before_its_person_allows_it(tmp_path):
    keys = {"activate": f"touch {tmp_path}/owned", "env": "{LD_PRELOAD: /tmp/evil.so, OMP_NUM_THREADS: '1'}"}
    refused = up(tmp_path, **keys)
    assert refused.returncode == 2
    assert f"a: activate: touch {tmp_path}/owned" in refused.stderr
    assert "a: env LD_PRELOAD" in refused.stderr
    assert "OMP_NUM_THREADS" not in refused.stderr
    assert "--allow-local" in refused.stderr
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "home" / "clusters").exists()


def test_what_was_allowed_once_is_not_asked_about_again_until_it_changes(tmp_path):
    keys = {"activate": f"touch {tmp_path}/owned", "python": "/no/such/python"}
    assert up(tmp_path, "--allow-local", **keys).returncode == 3
    assert (tmp_path / "owned").exists()
    assert up(tmp_path, **keys).returncode == 3
    assert up(tmp_path, **keys, prepare="echo more").returncode == 2


def test_the_file_of_the_demo_runs_our_own_programs_alone():
    inventory = load_inventory(Path(__file__).parents[2] / "inventory/local.yaml")
    assert [node.transport for node in inventory.nodes] == ["local", "local"]
    assert local_commands(inventory.nodes) == ()
