"""Whose a word of `orch run ...` is: orch's before the script, the script's after it. And what `~` stands for."""

import json
import shlex
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.hosts import Cluster, Node
from orchestrator.paths import Home
from orchestrator.planning import IMPORTS_TRAINER, names_in, pack_folder
from orchestrator.store import Store
from tests.support.probed_hosts import facts


@pytest.fixture
def runs(capfd, tmp_path, monkeypatch):
    """Types `orch run --dry-run --json LINE`; gives what each rank runs, and what is said beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    node = Node(name="alpha", host="10.0.0.1", gpu="A2000", gpus=1)
    found = facts(node="alpha", workdir="/home/lab/.orch")
    Store(Home.default()).save_cluster(Cluster(name="c", file="f", nodes=(node,), facts={"alpha": found}), current=True)

    def types(line: str, code: int = 0) -> tuple[list[str], str]:
        with pytest.raises(SystemExit) as end:
            main(["run", "--dry-run", "--json", *shlex.split(line)], prog_name="orch")
        out, err = capfd.readouterr()
        assert end.value.code == code, err
        plan = json.loads(out) if out else {"nodes": [{"command": []}], "notes": []}
        return plan["nodes"][0]["command"], "\n".join([*plan["notes"], err])

    return types


OWNERS = {
    "train.py --batch 96 --lr 0.1 --nodes x": "train.py --batch 96 --lr 0.1 --nodes x",
    "--batch 8 train.py --batch 96 --help": "train.py --batch 96 --help",
    "--nodes alpha -- train.py -- --lr 0.1": "train.py -- --lr 0.1",
    "train.py -- --lr 0.1 -- x": "train.py --lr 0.1 -- x",
    "-m pkg.train --lr 0.1 --dry-run": "-m pkg.train --lr 0.1 --dry-run",
    "-m pkg.train -- --lr 0.1": "-m pkg.train --lr 0.1",
    "-m --batch 8 -- pkg.train --batch 9": "-m pkg.train --batch 9",
    "python -u train.py --json": "-u train.py --json",
    "torchrun --max-restarts 3 train.py --lr 1": "train.py --lr 1",
}


@pytest.mark.parametrize("line", OWNERS)
def test_what_follows_the_script_belongs_to_it(line, runs):
    command, _ = runs(line)
    assert shlex.join(command) == OWNERS[line]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("train.py --batch 96 --nodes=x", "--batch, --nodes go to train.py; orch's own options go before it"),
        ("-m pkg.train --dry-run", "--dry-run goes to pkg.train; orch's own options go before it"),
        ("python train.py --exp x", "--exp goes to train.py"),
        ("-- train.py --batch 96", ""),
        ("train.py -- --batch 96", ""),
        ("train.py --lr 0.1", ""),
        ("torchrun --max-restarts 3 train.py", ""),
    ],
)  # fmt: skip
def test_a_word_like_an_option_of_orch_is_named(line, named, runs):
    _, said = runs(line)
    assert named in said
    assert (" to train.py" in said or " to pkg.train" in said) == bool(named)


@pytest.mark.parametrize(
    ("name", "begins", "command"),
    [
        ("run.sh", "echo hello", ["sh", "./run.sh", "1"]),
        ("run", "#!/usr/bin/env -S bash -e\n", ["/usr/bin/env", "-S", "bash", "-e", "./run", "1"]),
        ("run", "\x7fELF\0\0", None),
        ("run", "#!/usr/bin/env python3\nprint(1)", ["run", "1"]),
        ("run.py", "#!/usr/bin/env -S uv run --script\n", ["run.py", "1"]),
    ],
)
def test_a_file_of_another_language_is_started_as_its_first_line_says(name, begins, command, runs, tmp_path):
    (tmp_path / name).write_text(begins)
    found, err = runs(f"./{name} 1", code=0 if command else 2)
    assert found == (command or []) and (command or "compiled program that may not be executed" in err)
    (tmp_path / name).chmod(0o755)
    found, _ = runs(f"./{name} 1")
    is_python = command is not None and command[0] == name
    assert found == (command if is_python or name == "run.sh" else [f"./{name}", "1"])


def test_a_home_folder_that_the_shell_here_filled_in_is_named(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    _, err = runs("--exp mnist_lenet --set data_dir=/home/me/birds")
    assert "/home/me/birds lies in your home folder here, and on alpha that is /home/lab" in err
    assert "write --set 'data_dir=~/birds', with the quotes" in err
    assert "give the script a path of the hosts" in runs("train.py --data=/home/me/birds")[1]
    (tmp_path / "mine.py").write_text("import trainer\n")
    assert "write --set 'checkpoint_dir=~/c', with the quotes" in runs("--set checkpoint_dir=/home/me/c mine.py")[1]
    for line in ("--exp mnist_lenet --set 'data_dir=~/birds'", "train.py --data=/home/meg/birds"):
        assert "home folder" not in runs(line)[1]
    monkeypatch.setenv("HOME", "/home/lab")
    assert "home folder" not in runs("--exp mnist_lenet --set data_dir=/home/lab/birds")[1]


def test_a_tilde_reaches_the_hosts_as_it_was_written(runs):
    command, _ = runs("--exp mnist_lenet --set 'data_dir=~/birds'")
    assert "--data_dir=~/birds" in command
    assert str(Path.home()) not in " ".join(command)


def test_settings_of_a_script_that_imports_the_trainer_reach_it_in_its_environment(capfd, tmp_path, runs):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mine.py").write_text("import torch, trainer\n")
    line = "run --dry-run --json --folder . --batch 96 --set shares=alpha=1 --set amp=bf16 deep/mine.py --lr 1"
    with pytest.raises(SystemExit) as end:
        main(shlex.split(line), prog_name="orch")
    plan = json.loads(capfd.readouterr().out)
    assert end.value.code == 0
    (node,) = plan["nodes"]
    asked = json.loads(node["env"]["ORCH_SETTINGS"])
    assert asked == {"shares": "alpha=1", "amp": "bf16", "batch": "96", "device": "cuda", "backend": "nccl"}
    assert (node["command"], node["shares"]) == (["deep/mine.py", "--lr", "1"], [96])
    assert plan["settings"] == {"exp": "script", "shares": "alpha=1", "amp": "bf16", "batch": 96}
    assert "deep/trainer/session/join.py" in plan["files"], "beside the script, where Python looks first"


@pytest.mark.parametrize("line", ["train.py", "--batch 96 train.py"])
def test_a_script_that_does_not_import_it_is_sent_alone(capfd, line, runs):
    with pytest.raises(SystemExit):
        main(["run", "--dry-run", "--json", *line.split()], prog_name="orch")
    plan = json.loads(capfd.readouterr().out)
    assert "train.py" in plan["files"] and not [name for name in plan["files"] if name.startswith("trainer/")]
    assert "ORCH_SETTINGS" not in plan["nodes"][0]["env"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--set lr=0.1 train.py", "lr: is decided by the script"),
        ("--set strategy=auto train.py", "the script's network is unknown"),
        ("--set stratgy=ddp train.py", "did you mean strategy?"),
        ("--batch 3 --set batch=4 train.py", "contradict each other"),
    ],
)
def test_a_setting_that_no_script_has_is_refused_before_anything_starts(line, named, runs):
    _, said = runs(line, code=2)
    assert named in said


@pytest.mark.parametrize(
    ("line", "imports"),
    [
        ("import trainer", True),
        ("    from trainer import join", True),
        ("import torch, trainer as t", True),
        ("import trainer.session", True),
        ("import my_trainer, other.trainer", False),
        ("import torch  # and not trainer", False),
        ("from trainers import x", False),
        ("print('import trainer')", False),
    ],
)
def test_what_imports_the_trainer(line, imports):
    assert bool(IMPORTS_TRAINER.search(f"import os\n{line}\n".encode())) is imports


def test_a_module_of_ones_own_by_that_name_is_left_alone(tmp_path):
    (tmp_path / "train.py").write_text("from trainer import mine\n")
    (tmp_path / "trainer.py").write_text("mine = 1\n")
    code, blob = pack_folder(tmp_path, trainer_at="")
    assert names_in(blob) == ["train.py", "trainer.py"]
    (tmp_path / "trainer.py").unlink()
    code, blob = pack_folder(tmp_path, trainer_at="")
    assert "trainer/__init__.py" in names_in(blob)
    assert code.files == len(names_in(blob))
    assert names_in(pack_folder(tmp_path)[1]) == ["train.py"]
