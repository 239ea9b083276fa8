"""A rank of a pipeline that ends takes the others along at once: they blame the network, and it alone says why."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from PIL import Image

from orchestrator.remote.logs import is_secondary
from tests.support.forks import Forked
from tests.support.trainer_ranks import of_event, records, started

PIPELINE = ["--exp", "mnist_lenet", "--device", "cpu", "--augment", "none", "--num_workers", "0", "--batch", "16"]
PIPELINE += ["--strategy", "pipeline", "--accumulate", "4"]
LONG = ["--data", "synthetic", "--samples", "64", "--epochs", "10000", "--eval_every", "3"]
LANES = [{"ORCH_NODE": node, "LOCAL_RANK": lane, "LOCAL_WORLD_SIZE": "2"} for lane in "01" for node in "ab"]


def last_words(ranks: list[Forked]) -> list[list[str]]:
    """What each said on standard error until it ended; long before Gloo's patience is over."""
    return [rank.communicate(timeout=60)[1].splitlines() for rank in ranks]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all_and_no_other_blames_itself(tmp_path: Path, victim: int) -> None:
    """Two ranks share each of the two stages."""
    with started(tmp_path, [*PIPELINE, *LONG, "--stages", "a:0,b:1"], 4, of_ranks=LANES) as ranks:
        while len(of_event(records(tmp_path, 0), "step")) < 5:
            assert all(rank.poll() is None for rank in ranks), last_words(ranks)
            time.sleep(0.02)
        os.kill(ranks[victim].pid, signal.SIGKILL)
        said = last_words(ranks)
    assert [rank.returncode for rank in ranks] == [-9 if rank == victim else 1 for rank in range(4)]
    assert all(is_secondary(lines) for rank, lines in enumerate(said) if rank != victim)


def test_the_error_of_one_stage_is_its_own_and_the_others_are_not_blamed(tmp_path: Path) -> None:
    """Only the first stage reads images; the one that cannot be read comes in the middle of training."""
    for part in ("train", "val"):
        for name in "xy":
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(20):
                Image.new("L", (28, 28), number).save(tmp_path / part / name / f"{number}.png")
    (tmp_path / "train" / "y" / "7.png").write_bytes(b"\x89PNG and no more")
    broken = ["--data", "folder", "--data_dir", str(tmp_path), "--loader", "workers", "--stages", "node1:0,node0:1"]
    with started(tmp_path, [*PIPELINE, *broken], 2) as ranks:
        last, first = last_words(ranks)
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert first == [f"error: {tmp_path}/train/y/7.png cannot be read as an image: replace or remove it"]
    assert is_secondary(last) and not is_secondary(first)
