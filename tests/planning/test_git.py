"""What git is asked of a folder that is shipped: its commit, whether it changed, and never a program of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.planning import commit_of, pack_folder

WHO = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def ask(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, env={**os.environ, **WHO})
    return done.stdout.decode().strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with the script's folder in it, all committed."""
    folder = tmp_path / "repo" / "proj"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text("print(1)\n")
    (folder.parent / "other.py").write_text("")
    (folder.parent / ".gitignore").write_text("runs/\nvenv/\n")
    ask(folder.parent, "init", "-q")
    ask(folder, "add", "-A", "..")
    ask(folder, "commit", "-qm", "all")
    return folder


def test_a_folder_as_it_was_committed_is_named_by_its_commit(project: Path) -> None:
    commit = commit_of(project)
    assert commit is not None
    assert (commit.id, commit.dirty) == (ask(project, "rev-parse", "HEAD"), False)
    assert commit.words == f"commit {commit.id[:12]}"
    (project / "runs").mkdir()
    (project / "runs" / "log").write_text("")  # ignored
    (project.parent / "other.py").write_text("changed, and not shipped")
    assert pack_folder(project)[0].commit == commit


@pytest.mark.parametrize("change", ["edited", "staged", "new", "deleted"])
def test_any_other_content_is_noted(project: Path, change: str) -> None:
    if change == "deleted":
        (project / "train.py").unlink()
        (project / "b.py").write_text("")
    else:
        (project / ("new.py" if change == "new" else "train.py")).write_text("print(2)\n")
    if change == "staged":
        ask(project, "add", "-A")
    commit = pack_folder(project)[0].commit
    assert commit is not None and commit.dirty is True
    assert commit.words.endswith(", with changes that are not committed")


def test_what_is_no_part_of_a_commit_has_none(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, ignored = tmp_path / "empty", project / "venv"
    empty.mkdir()
    ignored.mkdir()
    assert commit_of(empty) is None
    assert commit_of(ignored) is None
    ask(empty, "init", "-q")
    assert commit_of(empty) is None  # without a commit
    assert commit_of(tmp_path / "not there") is None
    monkeypatch.setenv("PATH", str(empty))
    assert commit_of(project) is None


def test_a_folder_of_another_owner_is_no_error(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def as_another(words: list[str], env: dict[str, str], **options: object) -> object:
        return real(words, env={**env, "GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"}, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", as_another)
    assert commit_of(project) is None


@pytest.mark.parametrize("setting", ["core.fsmonitor", "filter.x.clean", "included"])
def test_a_repository_names_no_program_that_we_run(project: Path, setting: str) -> None:
    """As it may, where somebody else made it and we unpacked it."""
    hook = project.parent / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {project.parent}/ran\ncat\n")
    hook.chmod(0o755)
    (project / ".gitattributes").write_text("*.py filter=x\n")
    if setting == "included":
        (project.parent / "more").write_text(f'[filter "x"]\n\tclean = {hook}\n')
        ask(project, "config", "include.path", "../more")
    else:
        ask(project, "config", setting, str(hook))
    os.utime(project / "train.py", (1, 1))  # git has to look into it
    commit = commit_of(project)
    assert commit is not None
    assert commit.dirty is (True if setting == "core.fsmonitor" else None)
    assert not (project.parent / "ran").exists()
