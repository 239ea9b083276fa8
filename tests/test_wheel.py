"""The wheel that `pipx install` takes: it holds every file of the packages, and works where no clone is."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.quick_python import quick_python

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("orchestrator", "trainer")
ADDED = "torchx_plugins/schedulers/orch.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:  # a build writes beside its source
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "docs", source / "docs")
    words = ["wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(out), str(source)]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (made,) = out.glob("*.whl")
    return made


def test_it_holds_every_file_of_the_packages(wheel: Path) -> None:
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    ours = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    pages = {f"orchestrator/pages/{path.name}" for path in (ROOT / "docs").rglob("*.md")}
    assert held == {*ours, ADDED, *pages}


def test_torchx_finds_orch_and_its_own_schedulers_in_it(wheel: Path) -> None:
    modules = pytest.importorskip("torchx.schedulers").DEFAULT_SCHEDULER_MODULES
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/entry_points.txt"))
        text = file.read(name).decode()
    found = configparser.ConfigParser(delimiters="=")
    found.read_string(text)
    listed = dict(found["torchx.schedulers"])
    assert listed.keys() == {"orch", *modules}
    own = {name for name, value in listed.items() if value == f"{modules.get(name)}:create_scheduler"}
    assert listed.keys() - own == {"orch", "ray"}


def test_where_no_clone_is_a_job_runs_and_is_reported(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "hello.py").write_text("print('hello')\n")
    python = quick_python(tmp_path / "quick")
    nodes = "".join(f"  - {{name: {name}, address: 127.0.0.1, workdir: {tmp_path}/{name}}}\n" for name in "ab")
    (tmp_path / "empty" / "two.yaml").write_text(
        f"cluster: two\ndefaults: {{transport: local, device: cpu, ranks: 1, python: {python}}}\nnodes:\n{nodes}"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "ORCH_HOME": str(tmp_path / "home")}

    def orch(*words: str) -> str:
        words = (sys.executable, "-m", "orchestrator.cli", *words)
        done = subprocess.run(
            words, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = subprocess.run(
        [sys.executable, "-c", "import orchestrator, trainer; print(orchestrator.__file__, trainer.__file__)"],
        cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.split() == [
        str(tmp_path / "site" / name / "__init__.py") for name in ("orchestrator", "trainer")
    ]
    assert "# Slurm" in orch("help", "slurm")
    orch("up", "two.yaml", "--allow-local")
    assert orch("run", "--", "hello.py").count("hello") == 2
    orch("collect")
    (report,) = (tmp_path / "empty" / "runs").glob("*/report.html")
    assert "<html" in report.read_text()
    orch("down", "--yes", "--discard")


NAMED = re.compile(r"`orch help (\w+)`|(?<![\w/])(?:docs|deploy|inventory|tests)/[\w/.-]+|README\.md|CONTRIBUTING")


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_name_pages_that_are_there_and_no_file_of_a_clone(package: str) -> None:
    wrong = []
    for path in (ROOT / package).rglob("*.py"):
        tree = ast.parse(path.read_text())
        about = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in about:
                continue
            for match in NAMED.finditer(node.value):
                if not match[1] or not any((ROOT / "docs").rglob(f"{match[1]}.md")):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {match[0]}")
    assert wrong == []
