"""A folder of code arrives complete; what stays here is listed, and named when a script misses it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.planning import CodeFolder, names_in, pack_folder, unsent_words
from tests.support.files import fill
from tests.support.local_cluster import Place

SCRIPT = "print(open('config.yaml').read(), open('libs/util.py').read(), __import__('os').listdir('out'))\n"


def git(folder: Path, *words: str) -> None:
    quiet = [
        "-c",
        "user.email=a@b",
        "-c",
        "user.name=a",
        "-c",
        "protocol.file.allow=always",
        "-c",
        "init.defaultBranch=main",
    ]
    subprocess.run(["git", *quiet, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(params=["plain", "git"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made = fill(tmp_path / "proj", {"configs/base.yaml": "lr", "pkg/util.py": "U=1", "train.py": SCRIPT})
    if request.param == "git":
        git(made, "init", "-q", ".")
        git(made, "add", "-A")
        git(made, "commit", "-q", "-m", "first")
    return made


def content(blob: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
        return {member.name: tar.extractfile(member).read().decode() for member in tar if member.isfile()}  # type: ignore[union-attr]


def test_links_within_the_folder_bring_what_they_lead_to(folder: Path) -> None:
    (folder / "config.yaml").symlink_to("configs/base.yaml")
    (folder / "libs").symlink_to("pkg")
    (folder / "pkg/again.yaml").symlink_to("../config.yaml")
    (folder / "absolute.yaml").symlink_to(folder / "configs/base.yaml")
    code, blob = pack_folder(folder)
    assert content(blob) == {
        "configs/base.yaml": "lr",
        "config.yaml": "lr",
        "absolute.yaml": "lr",
        "pkg/again.yaml": "lr",
        "pkg/util.py": "U=1",
        "libs/util.py": "U=1",
        "train.py": SCRIPT,
    }
    assert code.unsent == () and not code.notes


def test_links_that_lead_outside_or_to_secrets_stay_and_are_named(folder: Path) -> None:
    fill(folder, {".env": "KEY=1"})
    fill(folder.parent, {"other.yaml": "x"})
    for name, target in {"a": "../other.yaml", "b": "nowhere", "c": ".", "d": "..", "e": "e"}.items():
        (folder / name).symlink_to(target)
    (folder / "env.txt").symlink_to(".env")
    os.mkfifo(folder / "pipe")
    code, blob = pack_folder(folder)
    assert set(content(blob)) == {"configs/base.yaml", "pkg/util.py", "train.py"}
    outside = "link that leads outside or nowhere"
    assert dict(code.unsent).items() >= dict.fromkeys("abcde", outside).items()
    assert f"a ({outside})" in code.notes[-1]


def test_empty_folders_go_along(folder: Path) -> None:
    for name in ("out", "pkg/empty/deeper", "new/er"):
        (folder / name).mkdir(parents=True)
    assert [name for name in names_in(pack_folder(folder)[1]) if name.endswith("/")] == [
        "new/er/",
        "out/",
        "pkg/empty/deeper/",
    ]


def test_what_is_ignored_is_listed_and_brought_back(folder: Path) -> None:
    fill(
        folder,
        {".gitignore": "*.so\nlocal.yaml\ndata/\n", "ext.so": "", "local.yaml": "me", "data/a": "1", "data/b": "2"},
    )
    code, blob = pack_folder(folder)
    assert dict(code.unsent) == dict.fromkeys(["data/", "ext.so", "local.yaml"], "ignored")
    fill(folder, {".orchignore": "!local.yaml\n!ext.so\n", "pkg/.orchignore": "!mine.so\n", "pkg/mine.so": ""})
    code, blob = pack_folder(folder)
    assert {"local.yaml", "ext.so", "pkg/mine.so"} <= set(names_in(blob))
    assert dict(code.unsent) == {"data/": "ignored"} and not [name for name in names_in(blob) if "data" in name]


def test_a_submodule_that_is_not_checked_out_is_named(tmp_path: Path) -> None:
    other = fill(tmp_path / "other", {"a.py": ""})
    git(other, "init", "-q", ".")
    git(other, "add", "-A")
    git(other, "commit", "-q", "-m", "first")
    folder = fill(tmp_path / "proj", {"train.py": ""})
    git(folder, "init", "-q", ".")
    git(folder, "submodule", "add", "-q", str(other), "third/lib")
    assert "third/lib/a.py" in names_in(pack_folder(folder)[1])
    git(folder, "submodule", "deinit", "-q", "-f", "third/lib")
    code, _ = pack_folder(folder)
    assert dict(code.unsent) == {"third/lib/": "submodule that is not checked out"}


UNSENT = (("data/", "ignored"), ("local.yaml", "ignored"), ("fast.cpython-311.so", "ignored"), ("x", "no file"))


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: 'local.yaml'", "local.yaml"),
        ("FileNotFoundError: [Errno 2] No such file or directory: './data/train/a.txt'", "data"),
        ("No such file or directory: '/home/u/.orch/jobs/j-1/src/local.yaml'", "local.yaml"),
        ("ModuleNotFoundError: No module named 'fast'", "fast.cpython-311.so"),
        ("ModuleNotFoundError: No module named 'secrets_of_mine.part'", "secrets_of_mine.py"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'other.yaml'", ""),
        ("ModuleNotFoundError: No module named 'fastai'", ""),
        ("RuntimeError: x", ""),
    ],
)
def test_a_line_about_a_missing_file_is_understood(line: str, names: str) -> None:
    code = CodeFolder(
        sha256="0", source="/home/me/p", files=1, size_bytes=1, left_out=("secrets_of_mine.py",), unsent=UNSENT
    )
    found = unsent_words(code, line)
    assert found.startswith(f"{names} is in /home/me/p, but was not shipped (") if names else not found
    assert not names or f"a line `!{names}` in .orchignore ships it" in found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield Place(tmp_path_factory.mktemp("complete"))


def test_what_was_not_shipped_is_the_first_cause(place: Place) -> None:
    folder = fill(place.here / "mine", {"train.py": SCRIPT, ".gitignore": "config.yaml\n", "config.yaml": "lr"})
    dry = place.types("run", "--dry-run", "mine/train.py").stdout
    assert "not shipped: config.yaml (ignored)" in dry
    place.types("run", "mine/train.py", code=1)
    cause = json.loads(place.types("jobs", "--json").stdout)["jobs"][0]["first_failure"]
    said = f"exited 1: config.yaml is in {folder}, but was not shipped (ignored); a line `!config.yaml` in .orchignore"
    assert said in cause["reason"]
    fill(folder, {"pkg/util.py": "U=1", ".orchignore": "!config.yaml\n"})
    (folder / "libs").symlink_to("pkg")
    (folder / "out").mkdir()
    assert "lr U=1 []" in place.types("run", "mine/train.py").stdout
