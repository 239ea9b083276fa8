"""Environments for hosts without a fitting torch: real venvs, a real pip, two tiny wheels that stand in for torch."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.cli.hosts import setup_question
from orchestrator.errors import HostError, UsageError
from orchestrator.hosts import RELEASES, Cluster, Venv
from orchestrator.planning import Requirements
from orchestrator.provision import Made, WantedVersions, choose, venvs
from orchestrator.record import Owner
from orchestrator.remote import environment
from orchestrator.transport import ConnectedHost, LocalTransport
from tests.support.lab import lab
from tests.support.quick_python import quick_python, with_quick_venv
from tests.support.terminal import Person

TORCH = """
__version__ = "2.3.1"
class version:
    cuda = None
from . import cuda, distributed
"""
CUDA = "is_available = lambda: False\nget_arch_list = list\n"
DISTRIBUTED = "is_available = lambda: True\n"
WANTED = WantedVersions("2.3.1", None, any_torch=False)


def wheel(folder: Path, name: str, version: str, files: dict[str, str], needs: str = "") -> None:
    """A pure Python wheel, made by hand (PEP 427). needs: what else has to be there."""
    info, needed = f"{name}-{version}.dist-info", f"Requires-Dist: {needs}\n" if needs else ""
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (0o100755 if "/scripts/" in path else 0o100644) << 16
            archive.writestr(entry, text)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Where pip is to look instead of an index: torch 2.3.1 with its torchvision, and a torch that does not load."""
    folder = tmp_path_factory.mktemp("wheels")
    parts = {"torch/distributed/__init__.py": DISTRIBUTED, "torch/cuda/__init__.py": CUDA}
    wheel(folder, "torch", "2.3.1", {"torch/__init__.py": TORCH, **parts})
    wheel(folder, "torchvision", "0.18.1", {"torchvision/__init__.py": "__version__ = '0.18.1'\n"}, "torch==2.3.1")
    wheel(folder, "torch", "2.4.0", {"torch/__init__.py": "raise ImportError('libnothing.so is missing')\n"})
    wheel(folder, "torchvision", "0.19.0", {"torchvision/__init__.py": "__version__ = '0.19.0'\n"}, "torch==2.4.0")
    folder.chmod(0o755)
    return folder


OWNER = Owner(id="a" * 32, name="ada@desk")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python with another torch than any that is asked for here; its pip lies in its folder, too."""
    folder = tmp_path_factory.mktemp("bare")
    return with_quick_venv(quick_python(folder), folder / "pip")


def set_up(workdir, env, wanted=WANTED, *, python, cluster="rack"):
    seen = []
    host = ConnectedHost(LocalTransport("here"), python, None, str(workdir))
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    envs = {"here": {**offline, **env}}
    return venvs.set_up({"here": host}, wanted, envs, seen.append, owner=OWNER, cluster=cluster)["here"], seen


def whole(workdir):
    """The markers of environments that are not half made."""
    return [path for path in workdir.glob("venv/*/orch-venv.json") if "found" in json.loads(path.read_text())]


def asked(python):
    code = "import torch, torchvision; print(torch.__version__, torchvision.__version__)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()


# ---- which versions -------------------------------------------------------------------------------------------


def test_the_torchvision_is_the_one_asked_for_or_the_one_that_matches():
    assert choose("2.3.1", None) == WANTED
    assert WANTED.requirements == ("torch==2.3.1", "torchvision")
    assert choose("2.3.1", "0.18.0").requirements == ("torch==2.3.1", "torchvision==0.18.0")


def test_without_a_word_it_is_what_this_machine_has_and_hosts_with_any_torch_stay():
    from importlib.metadata import version

    assert choose(None, None) == WantedVersions(version("torch"), None, any_torch=True)


def test_without_torch_on_this_machine_it_is_the_newest_known(monkeypatch):
    def missing(name):
        raise venvs.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(venvs.metadata, "version", missing)
    assert choose(None, None).torch == RELEASES[-1]


def test_a_torch_from_before_numpy_2_gets_an_older_numpy():
    assert "numpy<2" in choose("2.2.2", None).requirements
    assert "numpy<2" not in choose("2.3.0", None).requirements


@pytest.mark.parametrize(
    ("torch", "torchvision", "words"),
    [
        ("1.13.1", None, "too old"),
        (None, "9.9.9", "without --torch"),
        ("2.3.1; rm -rf /", None, "is not a version"),
        ("--pre", None, "is not a version"),
        ("2.3.1", "../x", "is not a version"),
    ],
)
def test_what_is_no_pair_is_refused(torch, torchvision, words):
    with pytest.raises(UsageError, match=words):
        choose(torch, torchvision)


def test_a_build_that_is_named_is_no_other_build():
    found = {"torch": "2.14.1+cu132", "torchvision": "0.29.1+cu132"}
    assert environment.fits(found, {"torch": "2.14.1", "torchvision": "0.29.1"})
    assert environment.fits(found, {"torch": "2.14.1+cu132", "torchvision": "0.29.1"})
    assert not environment.fits(found, {"torch": "2.14.1+cu126", "torchvision": "0.29.1"})
    assert not environment.fits(found, {"torch": "2.14.0", "torchvision": "0.29.1"})
    assert environment.fits(found, {"torch": "2.14.1", "torchvision": None})


# ---- on this machine ------------------------------------------------------------------------------------------


def test_an_environment_is_made_once_kept_and_made_again_where_it_is_half_done(wheels, bare, tmp_path):
    env = {"PIP_FIND_LINKS": str(wheels)}
    made, seen = set_up(tmp_path, env, python=bare)
    python = str(tmp_path / "venv/torch-2.3.1/bin/python")
    assert made == Made(python, "2.3.1", "0.18.1", "made")
    assert asked(made.python) == ["2.3.1", "0.18.1"]
    phases = list(dict.fromkeys(progress.phase for progress in seen if progress.phase != "connects"))
    assert phases == ["asks python", "makes venv", "installs torch", "tries torch"]
    nothing = {"PIP_FIND_LINKS": "/nowhere"}
    assert set_up(tmp_path, nothing, python=bare)[0] == replace(made, state="kept")
    marker = tmp_path / "venv/torch-2.3.1/orch-venv.json"
    marker.write_text(json.dumps({"users": json.loads(marker.read_text())["users"]}))
    failed, _ = set_up(tmp_path, nothing, python=bare)
    assert isinstance(failed, HostError)
    assert "No matching distribution found for torch==2.3.1" in failed.message
    assert whole(tmp_path) == []


def test_a_torch_that_does_not_load_is_reported_and_not_kept(wheels, bare, tmp_path):
    failed, _ = set_up(tmp_path, {"PIP_FIND_LINKS": str(wheels)}, choose("2.4.0", None), python=bare)
    assert "libnothing.so is missing" in failed.message
    assert whole(tmp_path) == []


def test_a_host_that_has_the_torch_itself_is_left_alone(tmp_path):
    own, _ = set_up(tmp_path, {}, choose(None, None), python=sys.executable)
    assert (own.state, own.python) == ("own", sys.executable)
    assert list(tmp_path.iterdir()) == []


def test_requirements_come_above_the_hosts_own_torch_once(wheels, bare, tmp_path):
    """The host's Python is a virtual environment that has a torch: none is fetched, and a second run does nothing."""
    base, _ = set_up(tmp_path / "host", {"PIP_FIND_LINKS": str(wheels)}, python=bare)
    with_quick_venv(base.python, tmp_path / "pip")
    seen = requirements_are_added(tmp_path, replace(WANTED, any_torch=True), base.python, str(tmp_path / "host"))
    assert "installs torch" not in {progress.phase for progress in seen}
    assert set_up(tmp_path / "work", {}, replace(WANTED, any_torch=True), python=base.python)[0].state == "own"


def test_requirements_come_above_an_environment_with_torch(wheels, bare, tmp_path):
    work = tmp_path / "work"
    assert set_up(work, {"PIP_FIND_LINKS": str(wheels)}, python=bare)[0].state == "made"
    requirements_are_added(tmp_path, WANTED, bare, str(work / "venv/torch-2.3.1/"))
    assert set_up(work, {}, python=bare)[0].python == str(work / "venv/torch-2.3.1/bin/python")


def requirements_are_added(tmp_path, wanted, python, below):
    """Without an index for torch. below: where the torch lies that the environment sees. What the first run showed."""
    wheel(tmp_path, "needed", "1.0", {"needed.py": "word = 'here'\n"})
    wheel(tmp_path, "later", "1.0", {"later.py": ""})
    work, env, nowhere = tmp_path / "work", {"PIP_FIND_LINKS": str(tmp_path)}, {"PIP_FIND_LINKS": "/nowhere"}

    def asks(*packages, env=env, cluster="rack"):
        extra = Requirements(packages, ("later<2",))
        return set_up(work, env, replace(wanted, extra=extra), python=python, cluster=cluster)

    made, seen = asks("needed==1.0", "torch")
    assert made.state == "added" and made.python.startswith(str(work / "venv/torch-2.3.1+"))
    assert "adds packages" in {progress.phase for progress in seen}
    code = "import needed, torch; print(needed.word, torch.__file__)"
    said = subprocess.run([made.python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "here" and said[1].startswith(below)
    assert asks("needed==1.0", "torch", env=nowhere)[0].state == "kept"
    assert asks("needed", "later")[0].state == "added"
    failed, _ = asks("torch==1.0")
    assert isinstance(failed, HostError) and failed.message.startswith("here: pip: ERROR"), failed
    assert asks("needed", "later")[0].state == "added"  # what failed half way is done again
    other, _ = asks("needed", cluster="another")
    assert other.state == "added" and other.python != made.python  # whose packages change nobody else's
    return seen


UV = """#!/bin/sh
[ -z "$UV_DEFAULT_INDEX$UV_FIND_LINKS" ] || echo "$UV_DEFAULT_INDEX|$UV_INDEX|$UV_FIND_LINKS" > {seen}
echo "$@" >> {seen}
{act}
"""


@pytest.fixture
def uv(tmp_path, monkeypatch):
    """uv(what it does): a uv on this host's PATH that notes how it was called. Gives the file with its notes."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def make(act):
        program, seen = tmp_path / "bin" / "uv", tmp_path / "seen"
        program.write_text(UV.format(seen=seen, act=act))
        program.chmod(0o755)
        return seen

    return make


def test_uv_installs_torch_with_the_settings_of_pip_and_no_password_in_its_arguments(uv, wheels, bare, tmp_path):
    real = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not real or str(tmp_path) in real:
        pytest.skip("no uv is installed here")
    seen = uv(f'UV_DEFAULT_INDEX= UV_INDEX= exec {real} "$@"')
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://me:s3cret@wheels.example/simple\nfind-links =\n  /nowhere\n")
    env = {
        "PIP_CONFIG_FILE": str(config),
        "PIP_FIND_LINKS": str(wheels),
        "PIP_EXTRA_INDEX_URL": "https://b/s https://c/s",
    }
    made, progress = set_up(tmp_path / "work", env, python=bare)
    assert (made.state, asked(made.python)) == ("made", ["2.3.1", "0.18.1"])
    settings, argv = seen.read_text().splitlines()
    assert settings == f"https://me:s3cret@wheels.example/simple|https://b/s https://c/s|{wheels}"
    assert "s3cret" not in argv and "--no-index" in argv and argv.endswith("torch==2.3.1 torchvision")
    assert not any("s3cret" in one.line for one in progress)
    assert not (tmp_path / "work/venv/torch-2.3.1/tmp").exists()


def test_a_uv_that_fails_leaves_it_to_pip(uv, wheels, bare, tmp_path):
    seen = uv("echo 'error: no solution'; exit 1")
    assert set_up(tmp_path / "work", {"PIP_FIND_LINKS": str(wheels)}, python=bare)[0].state == "made"
    assert "pip install" in seen.read_text()


def test_a_host_without_uv_is_brought_one_by_pip(monkeypatch, bare, wheels, tmp_path):
    """The wheel of a uv that notes its call and fails."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    links = tmp_path / "links"
    shutil.copytree(wheels, links)
    wheel(links, "uv", "9.9", {"uv-9.9.data/scripts/uv": UV.format(seen=tmp_path / "seen", act="exit 1")})
    made, _ = set_up(tmp_path / "work", {"PIP_FIND_LINKS": str(links)}, python=bare)
    assert isinstance(made, Made), made
    assert "pip install" in (tmp_path / "seen").read_text()


def test_an_environment_that_lost_its_torch_is_made_again(wheels, bare, tmp_path):
    env = {"PIP_FIND_LINKS": str(wheels)}
    made, _ = set_up(tmp_path, env, python=bare)
    (torch,) = Path(made.python).parents[1].glob("lib/python*/site-packages/torch")
    shutil.rmtree(torch)
    assert set_up(tmp_path, env, python=bare)[0] == made
    assert asked(made.python) == ["2.3.1", "0.18.1"]


def test_another_torchvision_is_another_environment(wheels, bare, tmp_path):
    made, _ = set_up(tmp_path, {"PIP_FIND_LINKS": str(wheels)}, choose("2.3.1", "0.18.1"), python=bare)
    assert made.python == str(tmp_path / "venv/torch-2.3.1+vision0.18.1/bin/python")


def test_a_folder_of_somebody_else_is_not_replaced(wheels, bare, tmp_path):
    set_up(tmp_path, {"PIP_FIND_LINKS": str(wheels)}, choose("2.4.0", None), python=bare)
    (tmp_path / "venv/torch-2.3.1").mkdir(parents=True)
    (tmp_path / "venv/torch-2.3.1/mine").touch()
    failed, _ = set_up(tmp_path, {"PIP_FIND_LINKS": str(wheels)}, python=bare)
    assert "`orch setup` did not make it" in failed.message


def test_leaving_ends_pip(bare, tmp_path):
    """The index takes the connection and says nothing: pip waits for it, and is gone when we are."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        address = f"http://user:secret@127.0.0.1:{index.getsockname()[1]}/"
        env = {"PIP_INDEX_URL": address, "PIP_CONFIG_FILE": "/dev/null", "PIP_TIMEOUT": "300"}
        index.settimeout(120)
        leave, host = threading.Event(), ConnectedHost(LocalTransport("here"), bare, None, str(tmp_path))

        def show(progress):
            assert "secret" not in progress.line
            if leave.wait(0):
                raise KeyboardInterrupt

        def until_interrupted():
            with pytest.raises(KeyboardInterrupt):
                venvs.set_up({"here": host}, WANTED, {"here": env}, show, owner=OWNER, cluster="rack")

        setting_up = threading.Thread(target=until_interrupted)
        setting_up.start()
        waiting, _ = index.accept()
        with waiting:
            waiting.settimeout(30)
            leave.set()
            while waiting.recv(4096):
                pass
        setting_up.join(30)
        assert not setting_up.is_alive()
    assert whole(tmp_path) == []


# ---- what is remembered ---------------------------------------------------------------------------------------


def test_a_clusters_nodes_run_the_environment_and_get_their_own_python_back():
    from orchestrator.hosts import Node

    nodes = tuple(Node(name=name, host=name, python="/usr/bin/python3") for name in ("a", "b"))
    venv = Venv(
        python="/w/venv/torch-2.3.1/bin/python", base_python="/usr/bin/python3", torch="2.3.1", torchvision="0.18.1"
    )
    changed = Cluster(name="c", file="c.yaml", nodes=nodes).with_venvs({"a": venv})
    assert [node.python for node in changed.nodes] == [venv.python, "/usr/bin/python3"]
    assert changed.with_venvs({}).nodes == nodes


def test_the_question_names_only_what_is_missing():
    facts = {
        f"h{n}": SimpleNamespace(torch=SimpleNamespace(version="2.3.1+cu121") if n > 1 else None) for n in range(4)
    }
    nodes, known = [SimpleNamespace(name=name) for name in facts], SimpleNamespace(facts=facts)
    anything, extra = replace(WANTED, any_torch=True), Requirements(("tqdm",))
    both = "Install torch 2.3.1 and torchvision on h0, h1"
    assert setup_question(known, nodes, anything, None) == f"{both}?"
    assert setup_question(known, nodes, WANTED, None) == f"{both}?"
    named = setup_question(known, nodes, choose("2.3.1", "0.18.1"), None)
    assert named == "Install torch 2.3.1 and torchvision 0.18.1 on h0, h1?"
    assert setup_question(known, nodes[2:], anything, None) == ""
    asked = setup_question(known, nodes, replace(anything, extra=extra), Path("r.txt"))
    assert asked == f"{both}, and 1 requirement of r.txt on h[0-3]?"


# ---- on a lab -------------------------------------------------------------------------------------------------


@pytest.mark.lab
@pytest.mark.timeout(300)
def test_from_setup_to_down(wheels, bare, tmp_path, tmp_path_factory):
    """One host finds the wheels, the other has no way out. `up` and `run` use the environment; `down` removes it."""
    links = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/home/lab/data/wheels", "PIP_CONFIG_FILE": "/dev/null"}
    inventory = f"""
cluster: setup
defaults: {{device: cpu, ranks: 1, python: {bare}}}
nodes:
  - {{name: alpha, host: 10.78.2.1, env: {json.dumps(links)}}}
  - {{name: beta, host: 10.78.2.2}}
"""
    home = tmp_path_factory.mktemp("home")
    with lab(inventory, binds=[str(Path(bare).parents[1])]) as pair:
        person = Person(pair, home, tmp_path)
        person.types("up", str(pair.inventory))
        person.types("data", "push", str(wheels), "--to", "wheels", "--nodes", "alpha")
        own = person.asks("run", "--exp", "mnist_lenet", "--dry-run")["nodes"][0]["python"]
        refused = person.types("setup", "--torch", "2.3.1", exit_code=2)
        assert "Install torch 2.3.1 and torchvision on" in refused.stderr
        done = person.types("setup", "--torch", "2.3.1", "--yes", "--json", exit_code=3)
        found = json.loads(done.stdout)["nodes"]
        python = "/home/lab/.orch/venv/torch-2.3.1/bin/python"
        assert (found["alpha"]["state"], found["alpha"]["python"]) == ("made", python)
        assert "No matching distribution" in found["beta"]["error"]
        assert "no way to a package index" in found["beta"]["error"]
        for _ in range(2):
            shown = {node["name"]: node for node in person.asks("status")["cluster"]["nodes"]}
            assert (shown["alpha"]["venv"], shown["alpha"]["torch"], shown["beta"]["venv"]) == ("2.3.1", "2.3.1", None)
            plan = person.asks("run", "--exp", "mnist_lenet", "--dry-run")
            assert {node["name"]: node["python"] for node in plan["nodes"]} == {"alpha": python, "beta": own}
            person.types("up", str(pair.inventory))
        person.types("down", "--yes", "--discard")
        assert pair.host_exec("alpha", ["ls", "-A", "/home/lab/.orch"]).returncode != 0
        assert person.asks("status")["cluster"]["nodes"][0]["venv"] is None
        assert person.asks("run", "--exp", "mnist_lenet", "--dry-run")["nodes"][0]["python"] == own
