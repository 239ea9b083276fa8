"""What is shipped: git's own choice of files, never a secret, never a home folder."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile

import pytest

from orchestrator.errors import UsageError
from orchestrator.planning import JobSpec, bundle, pack_folder, parse_job, variables
from orchestrator.provision import read_manifest
from tests.support.files import fill

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n"
NEVER = {
    ".ssh/id_ed25519": KEY,
    ".ssh/config": "",
    ".aws/credentials": "",
    ".gnupg/secring.gpg": "",
    ".kube/config": "",
    ".netrc": "",
    ".git-credentials": "",
    ".docker/config.json": "",
    ".config/gcloud/legacy.db": "",
    ".env": "TOKEN=1",
    "deep/.env.production": "",
    "prod.env": "",
    ".envrc": "",
    ".npmrc": "",
    "id_work": KEY,
    "certs/a.pem": "",
    "certs/A.KEY": "",
    "id_rsa": "",
    "deep/credentials.json": "",
    "notes.txt": KEY,
    "putty": "PuTTY-User-Key-File-3: ssh-ed25519\n",
    "rsa.txt": "\n-----BEGIN RSA PRIVATE KEY-----\n",
}
FINE = {
    "train.py": "KEY = '-----BEGIN PRIVATE KEY-----'",
    ".env.example": "TOKEN=",
    "cert.txt": "-----BEGIN CERTIFICATE-----\n",
    "keys.py": "",
    "id_to_label": "",
    "environment.yaml": "",
    "deep/x.py": "",
}


def shipped(folder):
    with tarfile.open(fileobj=io.BytesIO(pack_folder(folder)[1])) as tar:
        return set(tar.getnames())


def git(folder, *words):
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    options = ("-c", "protocol.file.allow=always")
    subprocess.run(["git", *options, *words], cwd=folder, check=True, capture_output=True, env={**os.environ, **who})


@pytest.mark.parametrize("kind", ["no repository", "untracked", "committed"])
def test_what_looks_like_a_secret_stays_and_is_named_whatever_git_says(tmp_path, kind):
    folder = fill(tmp_path / "proj", {**NEVER, **FINE})
    if kind != "no repository":
        git(folder, "init", "-q")
    if kind == "committed":
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "all")
    assert shipped(folder) == set(FINE)
    found = pack_folder(folder)[0]
    assert set(found.left_out) == set(NEVER)
    assert ".aws/credentials" in found.notes[-1] and ".orchignore" in found.notes[-1]


def test_one_is_sent_by_a_line_that_names_it_exactly_and_by_no_wildcard(tmp_path):
    folder = fill(tmp_path / "proj", {"a.py": "", "certs/test.pem": "", "certs/other.pem": "", ".env": ""})
    fill(folder, {".orchignore": "!certs/test.pem\n!*\n!**/.env\n"})
    assert shipped(folder) == {"a.py", "certs/test.pem", ".orchignore"}
    fill(folder, {"certs/.orchignore": "!other.pem\n"})
    assert shipped(folder) == {"a.py", "certs/test.pem", "certs/other.pem", ".orchignore", "certs/.orchignore"}


REPOSITORY = {
    ".gitignore": ".secret\n/scripts/local.yaml\nsub/\n",
    "scripts/train.py": "",
    "scripts/.secret": "1",
    "scripts/local.yaml": "",
    "scripts/deep/.gitignore": "*.txt\n!keep.txt\n",
    "scripts/deep/a.txt": "",
    "scripts/deep/keep.txt": "",
    "scripts/sub/x.py": "",
    "scripts/kept.log": "",
    "scripts/excluded.log": "",
    "scripts/.orchignore": "kept.*\n",
    "other/y.py": "",
}
TAKEN = {"train.py", "deep/.gitignore", "deep/keep.txt", ".orchignore"}


@pytest.fixture
def repository(tmp_path):
    folder = fill(tmp_path / "repo", REPOSITORY)
    git(folder, "init", "-q")
    fill(folder, {".git/info/exclude": "excluded.log\n"})
    return folder


def test_a_repositorys_ignore_files_above_and_below_the_folder_hold(repository):
    assert shipped(repository / "scripts") == TAKEN


@pytest.mark.parametrize("why", ["not installed", "another user"])
def test_they_hold_without_git_too_and_it_is_said(repository, why, monkeypatch):
    if why == "not installed":
        monkeypatch.setenv("PATH", "/nonexistent")
    else:
        monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        real = bundle.git

        def as_another(folder, *words, **options):
            done = real(folder, *words, **options)
            return subprocess.CompletedProcess(done.args, 128, b"", b"fatal: detected dubious ownership in repository")

        monkeypatch.setattr(bundle, "git", as_another)
    assert shipped(repository / "scripts") == TAKEN
    assert why in pack_folder(repository / "scripts")[0].notes[0]


def test_deleted_files_worktrees_and_submodules_are_what_git_has(tmp_path, repository):
    inner = fill(tmp_path / "inner", {"lib.py": "", ".gitignore": "*.bin\n"})
    git(inner, "init", "-q")
    git(inner, "add", "-A")
    git(inner, "commit", "-qm", "inner")
    git(repository, "submodule", "add", "-q", str(inner), "scripts/inner")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "all")
    git(repository, "worktree", "add", "-q", str(tmp_path / "tree"))
    fill(repository, {"scripts/inner/big.bin": ""})
    (repository / "scripts/deep/keep.txt").unlink()
    assert shipped(repository / "scripts") == TAKEN - {"deep/keep.txt"} | {"inner/lib.py", "inner/.gitignore"}
    assert shipped(tmp_path / "tree" / "scripts") == TAKEN
    assert ".git" not in shipped(tmp_path / "tree")


def test_a_folder_that_its_repository_ignores_as_a_whole_is_taken_by_its_own_rules(tmp_path):
    """A home folder under git that ignores all but its dot files, say."""
    home = fill(tmp_path / "dots", {".gitignore": "*\n!.bashrc\n", "proj/a.py": "", "proj/b.log": ""})
    fill(home, {"proj/.gitignore": "*.log\n"})
    git(home, "init", "-q")
    assert shipped(home / "proj") == {"a.py", ".gitignore"}


def test_a_repository_names_no_program_that_we_run(repository):
    fill(repository, {"hook": f"#!/bin/sh\ntouch {repository}/ran\n"})
    (repository / "hook").chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(repository / "hook"))
    assert shipped(repository / "scripts") == TAKEN
    assert not (repository / "ran").exists()


def test_a_home_folder_is_refused_and_so_is_what_holds_it(tmp_path, monkeypatch):
    home = fill(tmp_path / "home" / "me", {"train.py": "", "proj/train.py": ""})
    monkeypatch.setenv("HOME", str(home))
    for folder in (home, home.parent, tmp_path / "home" / "me" / ".." / "me"):
        with pytest.raises(UsageError, match="is your home folder, or holds it") as error:
            pack_folder(folder)
        assert "--folder" in error.value.remedy
        with pytest.raises(UsageError, match="home folder"):
            read_manifest(folder)
    assert shipped(home / "proj") == {"train.py"}
    monkeypatch.setenv("HOME", "/nowhere")  # what the password file says counts, too
    monkeypatch.setattr(variables.pwd, "getpwuid", lambda uid: type("Entry", (), {"pw_dir": str(home)}))
    with pytest.raises(UsageError, match="home folder"):
        pack_folder(home)
    monkeypatch.chdir(home)
    with pytest.raises(UsageError, match="home folder"):
        parse_job(JobSpec(module="some.module"))


def test_a_script_that_would_stay_at_home_itself_is_said(repository):
    fill(repository, {"scripts/sub/x.py": ""})
    with pytest.raises(UsageError, match=r"x.py itself would stay here: .gitignore.*!sub/x.py"):
        parse_job(JobSpec(folder=str(repository / "scripts"), script=str(repository / "scripts/sub/x.py")))


@pytest.mark.parametrize("name", [".netrc", "deep/.ssh/id_rsa", "train/notes.txt"])
def test_a_data_set_with_a_login_or_a_key_is_refused_but_not_for_a_files_ending(tmp_path, name):
    folder = fill(tmp_path / "data", {"train/a.pem": "12", "b.key": "34"})
    assert len(read_manifest(folder).files) == 2
    fill(folder, {name: KEY})
    with pytest.raises(UsageError, match="looks like a secret"):
        read_manifest(folder)


def test_a_dry_run_names_what_it_ships_and_what_it_leaves(tmp_path, capsys, monkeypatch):
    from orchestrator.cli import main

    folder = fill(tmp_path / "proj", {"train.py": "", ".env": "", **{f"m{n:02}.py": "" for n in range(50)}})
    (tmp_path / "i.yaml").write_text(
        "cluster: c\nnodes: [{name: a, transport: local, address: 127.0.0.1, device: cpu, ranks: 1}]\n"
    )

    def orch(*words):
        with pytest.raises(SystemExit) as end:
            main([*words])
        assert not end.value.code, capsys.readouterr()
        return capsys.readouterr()

    orch("up", str(tmp_path / "i.yaml"))
    text = orch("run", "--dry-run", "--", str(folder / "train.py"))
    assert "m38.py" in text.out and "m45.py" not in text.out and "and 11 more" in text.out
    assert "left out: .env" in (text.out + text.err).replace("\n", " ")
    document = json.loads(orch("run", "--dry-run", "--json", "--", str(folder / "train.py")).out)
    assert len(document["files"]) == 51 and document["code"]["left_out"] == [".env"]
