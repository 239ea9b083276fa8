"""Starting without torchrun: real ranks of `--spawn`, and what torch.distributed.launch adds to the arguments."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")

from tests.support import forks
from tests.support.quick_python import quick_python
from trainer.__main__ import starting
from trainer.shared import SettingsError

ROOT = Path(__file__).parents[2]
SYNTHETIC = ["--exp", "mnist_lenet", "--data", "synthetic", "--device", "cpu", "--num_workers", "0"]


@contextlib.contextmanager
def spawned(folder: Path, *arguments: str, fresh: bool = False) -> Iterator[Any]:
    """`python -m trainer --spawn 2` in a session of its own, of which nothing may stay."""
    env = {**os.environ, "ORCH_METRICS": f"{folder}/{{rank}}.jsonl", "OMP_NUM_THREADS": "1"}
    words = ["--spawn", "2", *SYNTHETIC, *arguments]
    process: Any
    if fresh:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "trainer", *words]
        process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes)
    else:
        process = forks.start(forks.TRAINER, words, cwd=ROOT, env=env, session=True)
    with process:
        try:
            yield process
            wait_until(lambda: not is_there(process.pid))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def is_there(group: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def records(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def wait_until(condition: Callable[[], bool], timeout_s: float = 100) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def children(parent: int) -> list[int]:
    """Its ranks, in their order."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_ranks_train_together_and_the_end_is_theirs(tmp_path: Path) -> None:
    with spawned(tmp_path, "--samples", "100", "--epochs", "1", "--eval_every", "0", fresh=True) as process:
        said, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
    first = "mnist_lenet: lenet on synthetic, batch 64 over 2 ranks, strategy ddp, fidelity exact"
    assert said.splitlines()[0] == first
    steps = [[line["samples"] for line in records(tmp_path, rank) if line["event"] == "step"] for rank in range(2)]
    assert steps == [[32, 18], [32, 18]]
    assert [records(tmp_path, rank)[0]["local_rank"] for rank in range(2)] == [0, 1]


def test_what_all_ranks_refuse_is_said_once(tmp_path: Path) -> None:
    with spawned(tmp_path, "--shares", "nobody=1") as process:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1
    first, last = errors.splitlines()
    assert first.startswith("error: shares: nobody takes no part")
    assert last.endswith("exited 1; the others were ended")


def test_a_rank_that_is_killed_ends_all_and_is_named(tmp_path: Path) -> None:
    with spawned(tmp_path, "--epochs", "1000") as process:
        wait_until(lambda: len(records(tmp_path, 0)) > 3)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGKILL
    assert errors.splitlines()[-1] == "rank 1 was killed by SIGKILL; the others were ended"


@pytest.mark.parametrize(("signum", "code", "to_all"), [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)])
def test_a_signal_ends_all_ranks_with_one_line(tmp_path: Path, signum: int, code: int, to_all: bool) -> None:
    """A terminal's Ctrl-C reaches every process, `kill` the first alone."""
    with spawned(tmp_path, "--epochs", "1000") as process:
        wait_until(lambda: len(records(tmp_path, 0)) > 3 and len(records(tmp_path, 1)) > 3)
        os.killpg(process.pid, signum) if to_all else os.kill(process.pid, signum)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code
    assert errors.splitlines()[0] == f"interrupted by {signal.Signals(signum).name}"
    assert errors.count("interrupted by") == 1
    assert [records(tmp_path, rank)[-1]["status"] for rank in range(2)] == ["interrupted"] * 2


def test_torch_distributed_launch_may_add_its_argument(tmp_path: Path) -> None:
    env = {**os.environ, "ORCH_METRICS": f"{tmp_path}/{{rank}}.jsonl", "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.launch", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*launch, "trainer", *SYNTHETIC, "--steps", "2", "--eval_every", "0"]
    python = quick_python(tmp_path / "quick", torchrun=True)
    result = subprocess.run([python, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert [records(tmp_path, rank)[0]["local_rank"] for rank in range(2)] == [0, 1]


@pytest.mark.parametrize("form", ["--local_rank=1", "--local-rank=1", "--local_rank 1", "--local-rank 1"])
def test_a_local_rank_among_the_arguments_is_taken_out(form: str) -> None:
    assert starting([*form.split(), "--exp", "mnist_lenet"]) == ("", 0, ["--exp", "mnist_lenet"])


@pytest.mark.parametrize("form", ["--spawn=3", "--spawn 3"])
def test_spawn_takes_a_number_of_ranks(form: str) -> None:
    assert starting(["--exp", "mnist_lenet", *form.split()]) == ("--spawn", 3, ["--exp", "mnist_lenet"])


@pytest.mark.parametrize("words", ["--spawn", "--spawn=0", "--srun=0", "--spawn -1", "--spawn many", "--local_rank x"])
def test_what_is_no_number_of_ranks_is_one_line(words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        starting(words.split())
    assert len(caught.value.mistakes) == 1


def test_a_rank_of_torchrun_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SettingsError, match="torchrun or srun has started this rank already"):
        starting(["--spawn", "2"])
