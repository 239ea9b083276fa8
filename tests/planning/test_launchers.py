"""What people type before a script is understood, or the error says what to type."""

import shlex
from dataclasses import replace

import pytest

from orchestrator.errors import UsageError
from orchestrator.planning import Program, read_program

UNDERSTOOD = {
    "train.py --batch 96 --lr 0.1": Program("train.py", ("--batch", "96", "--lr", "0.1")),
    "python train.py -m x": Program("train.py", ("-m", "x")),
    "/opt/conda/bin/python3.11 -u -X dev -Wignore a/train.py": Program("a/train.py", flags=("-u", "-Xdev", "-Wignore")),
    "python -m pkg.train --lr 0.1": Program("pkg.train", ("--lr", "0.1"), is_module=True),
    "torchrun --nproc_per_node=4 --nnodes 2 --standalone train.py --nnodes 3": Program("train.py", ("--nnodes", "3")),
    "torchrun -m pkg.train -r 3": Program("pkg.train", ("-r", "3"), is_module=True),
    "python -m torch.distributed.launch --use_env train.py -- x": Program("train.py", ("--", "x")),
    "accelerate launch --multi_gpu --num-processes 4 --config_file c.yaml -- train.py -q": Program("train.py", ("-q",)),
    "./torchrun x": Program("./torchrun", ("x",)),
    "bash run.sh 1": Program("bash", ("run.sh", "1"), is_hosts=True),
    "/usr/bin/env A=1 python train.py": Program("/usr/bin/env", ("A=1", "python", "train.py"), is_hosts=True),
}


@pytest.mark.parametrize("line", UNDERSTOOD)
def test_a_launcher_before_the_script_is_understood_and_named(line):
    found = read_program(shlex.split(line))
    notes = found.notes
    assert replace(found, notes=()) == UNDERSTOOD[line]
    first = line.split()[0]
    assert bool(notes) == (first not in ("train.py", "./torchrun", "bash", "/usr/bin/env"))
    assert all(note.startswith(f"left out: {first}") for note in notes)


def test_what_a_launchers_options_say_of_ranks_is_named():
    (note,) = read_program(shlex.split("torchrun --nproc_per_node=4 --nnodes 2:3 train.py")).notes
    assert "torchrun --nproc_per_node=4 --nnodes 2:3;" in note
    assert "`ranks:`" in note and "--nodes A,B" in note and "--retries N" in note
    (note,) = read_program(shlex.split("torchrun --nproc-per-node 4 --max-restarts=0 train.py")).notes
    assert "--retries" not in note


REFUSED = {
    "mpirun -np 4 python train.py --lr 'a b'": ("mpirun starts processes", "orch run -- train.py --lr 'a b'"),
    "nohup ./run.sh 3": ("nohup starts processes", "orch run -- ./run.sh 3"),
    "SEED=s3cret python train.py": ("SEED=... sets a variable", "orch run --env SEED=... -- python train.py"),
    "python -c 'print(1)'": ("python -c runs no script", "orch run -- train.py ARGS"),
    "python": ("python alone runs no script", "orch run -- train.py ARGS"),
    "torchrun --nnodes 2": ("torchrun names no script", "orch run -- train.py ARGS"),
    "torchrun --no-python ./run.sh": ("torchrun --no-python: orch cannot", "orch run -- ./run.sh"),
    "accelerate config": ("accelerate config starts no script", "orch run -- train.py ARGS"),
    "accelerate launch --use_deepspeed train.py 1": (
        "accelerate launch --use_deepspeed: orch cannot",
        "orch run -- train.py 1",
    ),
    "accelerate launch --cpu --mixed_precision bf16 -m pkg.train 1": (
        "passes these options to the script as variables",
        "orch run --env ACCELERATE_USE_CPU=true --env ACCELERATE_MIXED_PRECISION=bf16 -m -- pkg.train 1",
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_orch_cannot_start_is_refused_with_the_line_to_type(line):
    said, remedy = REFUSED[line]
    with pytest.raises(UsageError) as refused:
        read_program(shlex.split(line))
    assert said in refused.value.message
    assert refused.value.remedy.endswith(remedy)
    assert "s3cret" not in str(refused.value)


def test_a_file_in_place_of_a_module_is_named():
    with pytest.raises(
        UsageError, match=r"-m takes the name of a module, not pkg/train.py: orch run -- pkg/train.py 1"
    ):
        read_program(("pkg/train.py", "1"), is_module=True)
