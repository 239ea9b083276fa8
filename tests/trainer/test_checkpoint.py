"""Checkpoints: a run that was interrupted goes on as if it had not been; real ranks, real files, real kills."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import tarfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.free_port import free_port

pytest.importorskip("torch")
pytest.importorskip("torchvision")

import torch
from PIL import Image

from tests.support import forks
from tests.support.checkpoint_driver import run_rank
from tests.support.quick_python import quick_python
from trainer.checkpoints import (
    Checkpoint,
    for_other_ranks,
    keeper_of,
    name_of,
    newest,
    open_folder,
    parse,
    read_file,
    write_file,
)
from trainer.shared import TrainError

SMALL = ["--exp", "mnist_lenet", "--data", "synthetic", "--device", "cpu", "--num_workers", "0"]
SMALL += ["--samples", "203", "--batch", "32", "--epochs", "3", "--augment", "affine"]  # 7 updates an epoch, 21 in all
LAST = 21


FORKS = multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def started(folder: Path, arguments: list[str], world_size: int, **more: str) -> Iterator[list[Any]]:
    """One process a rank, with its records in `folder`; killed at the end."""
    folder.mkdir(exist_ok=True)
    port = str(free_port())
    usual = [word for pair in zip(SMALL[::2], SMALL[1::2], strict=True) if pair[0] not in arguments for word in pair]
    processes = []
    for rank in range(world_size):
        who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ORCH_NODE": f"node{rank}", "OMP_NUM_THREADS": "1"}
        environment = {name: str(value) for name, value in who.items()} | where | more
        environment["ORCH_METRICS"] = str(folder / "{rank}.jsonl")
        process = FORKS.Process(target=run_rank, args=(folder, str(rank), environment, [*usual, *arguments]))
        process.start()
        processes.append(process)
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def ended(folder: Path, arguments: list[str], world_size: int, code: int, **more: str) -> list[str]:
    """What each rank said on standard error, of a run that ends with this exit code."""
    with started(folder, arguments, world_size, **more) as processes:
        for process in processes:
            process.join(120)
    errors = [(folder / f"{rank}.err").read_text() for rank in range(world_size)]
    assert [process.exitcode for process in processes] == [code] * world_size, errors
    return errors


def finished(folder: Path, arguments: list[str], world_size: int = 2, **more: str) -> str:
    """What rank 0 printed, of a run that succeeds."""
    assert ended(folder, arguments, world_size, 0, **more) == [""] * world_size
    return (folder / "0.out").read_text()


def refused(folder: Path, arguments: list[str], world_size: int = 1, **more: str) -> str:
    """The one line with which every rank refuses."""
    (line,) = set(ended(folder, arguments, world_size, 1, **more))
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    return line


def events(folder: Path, event: str, rank: int = 0) -> list[dict[str, Any]]:
    path = folder / f"{rank}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [record for record in map(json.loads, lines) if record["event"] == event]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


def losses(folder: Path, rank: int, first: int = 0) -> dict[int, float]:
    return {step["step"]: step["loss"] for step in events(folder, "step", rank) if step["step"] >= first}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody interrupts, and that writes no checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    finished(folder, [])
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that stop in the middle of the second epoch, after update 10; checkpoints at 4, 8 and 10."""
    folder = tmp_path_factory.mktemp("stopped")
    finished(folder, ["--checkpoint_every", "4", "--steps", "10"])
    return folder


def assert_goes_on_like(whole: Path, resumed: Path, first: int) -> None:
    for rank in range(2):
        assert losses(resumed, rank) == losses(whole, rank, first)
        assert list(losses(resumed, rank)) == list(range(first, LAST))
    begun = first // 7  # the epoch in which it goes on
    for event in ("epoch", "eval"):
        timeless = [{**one, "epoch_s": 0, "eval_s": 0} for one in events(whole, event)[begun:]]
        assert [{**one, "epoch_s": 0, "eval_s": 0} for one in events(resumed, event)] == timeless


def test_a_run_goes_on_in_mid_epoch_bit_for_bit(whole: Path, stopped: Path, tmp_path: Path) -> None:
    said = finished(tmp_path, ["--resume", str(stopped / "checkpoints")])
    assert f"going on from {stopped / 'checkpoints'} after 10 updates\n" in said
    assert_goes_on_like(whole, tmp_path, first=10)


def test_a_run_that_was_killed_between_checkpoints_goes_on_from_the_last_one(whole: Path, tmp_path: Path) -> None:
    slow = ["--slow", "rank:0,at:start,ms:120"]  # longer than lines of quick steps wait to be written
    with started(tmp_path / "killed", ["--checkpoint_every", "4", *slow], 2) as processes:
        wait_until(lambda: len(losses(tmp_path / "killed", 0)) > 9)
        for process in processes:
            process.kill()
    found = newest(tmp_path / "killed" / "checkpoints")
    assert found
    first = int(found.stem.removeprefix("step-"))
    assert first < len(losses(tmp_path / "killed", 0)) < LAST
    finished(tmp_path / "resumed", ["--resume", str(found)])
    assert_goes_on_like(whole, tmp_path / "resumed", first)


def goes_on_alike(folder: Path, settings: list[str]) -> None:
    """From update 16 of 21, of a run that nobody interrupts."""
    settings = [*settings, "--eval_every", "0"]
    finished(folder / "whole", [*settings, "--checkpoint_every", "8"])
    finished(folder / "resumed", [*settings, "--resume", f"../whole/checkpoints/{name_of(16)}"])
    for rank in range(2):
        assert losses(folder / "resumed", rank) == losses(folder / "whole", rank, 16)
        assert len(losses(folder / "resumed", rank)) == LAST - 16


def test_a_learning_rate_goes_on_where_it_was(tmp_path: Path) -> None:
    goes_on_alike(tmp_path, ["--lr_schedule", "cosine", "--lr_warmup", "2.5"])


ADAMW = ["--optimizer", "adamw", "--lr", "0.003"]
PARTS = {
    "ddp": [],
    "local": ["--fidelity", "local", "--local_steps", "3", "--local_overlap", "1"],
    "pipeline": ["--strategy", "pipeline"],
    "tensor": ["--strategy", "tensor"],
}


@pytest.mark.parametrize("way", PARTS)
def test_adamw_goes_on_bit_for_bit(tmp_path: Path, way: str) -> None:
    goes_on_alike(tmp_path, [*ADAMW, *PARTS[way]])


@pytest.mark.parametrize("way", ["ddp", "pipeline", "tensor"])
def test_averaged_weights_and_their_statistics_go_on_bit_for_bit(tmp_path: Path, way: str) -> None:
    settings = ["--ema", "0.9", "--eval_every", "0", "--checkpoint_every", "8", *PARTS[way]]
    finished(tmp_path / "whole", settings)
    said = finished(tmp_path / "resumed", [*settings, "--resume", f"../whole/checkpoints/{name_of(16)}"])
    assert "started fresh" not in said
    whole, resumed = (
        read_file(tmp_path / name / "checkpoints" / name_of(LAST)).checkpoint for name in ("whole", "resumed")
    )
    assert whole.ema.keys() == whole.model.keys()
    for name, tensor in whole.ema.items():
        assert torch.equal(tensor, resumed.ema[name]), name
        assert torch.equal(whole.model[name], resumed.model[name]), name
        assert not tensor.is_floating_point() or not torch.equal(tensor, whole.model[name]), name


def test_a_run_may_begin_to_average_its_weights(stopped: Path, tmp_path: Path) -> None:
    said = finished(tmp_path, ["--ema", "0.9", "--resume", str(stopped / "checkpoints")])
    assert "after 10 updates; ema: not in the checkpoint, started fresh\n" in said


def test_another_optimiser_does_not_go_on_with_what_this_one_remembers(stopped: Path, tmp_path: Path) -> None:
    line = refused(tmp_path, [*ADAMW, "--resume", str(stopped / "checkpoints")], 2)
    assert (
        "optimiser state in the checkpoint is of another optimiser than AdamW (it has momentum_buffer): start" in line
    )


def test_averaged_weights_go_on_in_mid_round_with_each_ranks_own_momentum(tmp_path: Path) -> None:
    way = ["--fidelity", "local", "--local_steps", "3", "--eval_every", "0"]
    finished(tmp_path / "whole", way)
    finished(tmp_path / "stopped", [*way, "--checkpoint_every", "8", "--steps", "8"])
    finished(tmp_path / "resumed", [*way, "--resume", "../stopped/checkpoints"])
    for rank in range(2):
        assert losses(tmp_path / "resumed", rank) == losses(tmp_path / "whole", rank, 8)


def test_what_compressing_has_left_out_goes_on_with_each_rank(tmp_path: Path) -> None:
    """Rank 0's weights are kept, and all ranks' are the same on CPUs of one kind."""
    way = ["--fidelity", "compressed", "--compress_rank", "1", "--compress_after", "2", "--eval_every", "0"]
    finished(tmp_path / "whole", way)
    finished(tmp_path / "stopped", [*way, "--checkpoint_every", "8", "--steps", "8"])
    finished(tmp_path / "resumed", [*way, "--resume", "../stopped/checkpoints"])
    for rank in range(2):
        assert losses(tmp_path / "resumed", rank) == losses(tmp_path / "whole", rank, 8)


def test_what_one_way_to_synchronise_keeps_is_not_poured_into_another(tmp_path: Path) -> None:
    """The outer momentum stands before the ranks' own; it matters first when weights are averaged again."""
    way = ["--fidelity", "local", "--local_steps", "3", "--checkpoint_every", "9", "--eval_every", "0"]
    finished(tmp_path / "stopped", [*way, "--steps", "9", "--outer_momentum", "0.5"])
    resume = [*way, "--resume", "../stopped/checkpoints", "--steps", "12", "--outer_momentum"]
    finished(tmp_path / "with", [*resume, "0.5"])
    assert "after 9 updates; velocity: left out\n" in finished(tmp_path / "without", [*resume, "0"])
    for rank in range(2):
        assert losses(tmp_path / "without", rank) == losses(tmp_path / "with", rank)
    compressed = ["--fidelity", "compressed", "--steps", "10", "--resume", "../stopped/checkpoints"]
    said = finished(tmp_path / "compressed", compressed)
    assert "; memory, q, updates: not in the checkpoint, started fresh; velocity: left out\n" in said


def test_other_ranks_begin_with_a_mean_by_samples_and_owe_as_much_as_before(tmp_path: Path) -> None:
    names = ("statistics.0", "memory.1x2", "updates")
    of_ranks = [{name: torch.full((2,), value) for name in names} for value in (1.0, 5.0)]
    saved = read_file(written(tmp_path, own=of_ranks, sums=[[0.0, 9.0, 3.0], [0.0, 9.0, 1.0]]))[0]
    found = for_other_ranks(saved, world_size=4)
    assert [found[name].tolist() for name in names] == [[2.0] * 2, [6.0 / 4] * 2, [3.0] * 2]
    averaged = read_file(written(tmp_path, own=[of_ranks[1]] * 2, sums=[[0.0, 9.0, 0.0]] * 2))[0]
    assert for_other_ranks(averaged, world_size=1)["statistics.0"].tolist() == [5.0] * 2


def test_a_checkpoint_at_the_end_of_an_epoch_still_evaluates_it(whole: Path, tmp_path: Path) -> None:
    finished(tmp_path / "ended", ["--checkpoint_every", "7", "--steps", "14"])
    finished(tmp_path / "resumed", ["--resume", str(tmp_path / "ended/checkpoints")])
    assert [one["epoch"] for one in events(tmp_path / "resumed", "eval")] == [1, 2]
    for rank in range(2):
        assert losses(tmp_path / "resumed", rank) == losses(whole, rank, 14)
    assert events(tmp_path / "resumed", "eval")[0]["loss"] == events(whole, "eval")[1]["loss"]


def test_a_run_that_had_ended_by_its_steps_trains_no_further(stopped: Path, tmp_path: Path) -> None:
    """Neither does it write a checkpoint, before which its good ones would go."""
    kept = shutil.copytree(stopped / "checkpoints", tmp_path / "checkpoints")
    names = sorted(path.name for path in kept.iterdir())
    finished(tmp_path, ["--checkpoint_every", "4", "--steps", "10", "--resume", str(kept)])
    assert [events(tmp_path, event) for event in ("step", "checkpoint")] == [[], []]
    assert sorted(path.name for path in kept.iterdir()) == names
    assert events(tmp_path, "end")[0]["status"] == "succeeded"
    (again,), last = events(tmp_path, "eval"), events(stopped, "eval")[-1]
    assert (again["step"], again["loss"]) == (last["step"], last["loss"])


def test_another_number_of_ranks_goes_on_with_the_same_samples(stopped: Path, tmp_path: Path) -> None:
    said = finished(tmp_path, ["--resume", str(stopped / "checkpoints")], world_size=1)
    (line,) = [line for line in said.splitlines() if line.startswith("going on")]
    assert "made by 2 ranks with shares 16,16: the samples stay the same, BatchNorm begins with the mean" in line
    assert [one["samples"] for one in events(tmp_path, "epoch")] == [203, 203]
    assert [step["samples"] for step in events(tmp_path, "step")] == [32] * 3 + [11] + [32] * 6 + [11]
    saved = read_file(stopped / "checkpoints").checkpoint
    assert not torch.equal(saved.own[0]["statistics.0"], saved.own[1]["statistics.0"])


def test_shares_that_a_run_had_come_to_by_itself_go_on_with_the_same_ranks(tmp_path: Path) -> None:
    """Not one of the updates is left to judge the ranks by: only their speeds decide what a run begins with."""
    way = ["--shares", "auto", "--warmup_steps", "30", "--speeds"]
    uneven, even = ([*way, f"node0:0=0+1,node1:1=0+{sample_ms}"] for sample_ms in (3, 1))
    finished(tmp_path / "whole", uneven)
    finished(tmp_path / "stopped", [*uneven, "--checkpoint_every", "10", "--steps", "10"])
    finished(tmp_path / "resumed", [*even, "--resume", "../stopped/checkpoints"])
    assert_goes_on_like(tmp_path / "whole", tmp_path / "resumed", first=10)
    (change,) = events(tmp_path / "resumed", "rebalance")
    assert (change["step"], change["shares"], change["before"]) == (10, [24, 8], [16, 16])


def test_without_batch_norm_other_ranks_give_the_same_losses(tmp_path: Path) -> None:
    """What the epoch had summed up before counts once."""
    plain = {"LENET": "1"}
    finished(tmp_path / "one", [], world_size=1, **plain)
    finished(tmp_path / "two", ["--checkpoint_every", "10", "--steps", "10"], **plain)
    finished(tmp_path / "other", ["--resume", "../two/checkpoints", "--shares", "node0=3,node1=1"], **plain)
    wanted, found = events(tmp_path / "one", "epoch")[1:], events(tmp_path / "other", "epoch")
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine["samples"] == theirs["samples"] == 203
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_the_newest_two_stay_and_each_has_a_record(stopped: Path) -> None:
    files = sorted((stopped / "checkpoints").iterdir())
    assert [path.name for path in files] == ["step-000000008.pt", "step-000000010.pt"]
    assert [path.stat().st_mode & 0o777 for path in files] == [0o600] * 2
    records = events(stopped, "checkpoint")
    assert [(one["step"], one["name"], one["failure"]) for one in records] == [
        (3, "step-000000004.pt", None),
        (7, "step-000000008.pt", None),
        (9, "step-000000010.pt", None),
    ]
    assert [one["bytes"] for one in records[1:]] == [path.stat().st_size for path in files]
    assert all(one["write_ms"] > 0 for one in records)
    assert events(stopped, "checkpoint", rank=1) == []


def test_the_time_of_writing_counts_into_no_step_of_any_rank(tmp_path: Path) -> None:
    finished(tmp_path, ["--checkpoint_every", "2", "--steps", "6"], WRITE_S="0.4")
    assert all(one["write_ms"] > 400 for one in events(tmp_path, "checkpoint"))
    for rank in range(2):
        (epoch,) = events(tmp_path, "epoch", rank)
        steps_s = sum(step["t_ms"] for step in events(tmp_path, "step", rank)) / 1000
        assert epoch["epoch_s"] - steps_s >= 3 * 0.4


def test_a_learning_rate_that_a_person_changes_holds(stopped: Path, whole: Path, tmp_path: Path) -> None:
    finished(tmp_path, ["--resume", str(stopped / "checkpoints"), "--lr", "0.001"])
    mine, theirs = losses(tmp_path, 0), losses(whole, 0, 10)
    assert mine[10] == theirs[10]
    assert mine[11] != theirs[11]


def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    """No file may have more bytes than this: as on a full disk, a write gets some of them to it and then fails."""
    folder = tmp_path / "run"
    (said,) = ended(folder, ["--checkpoint_every", "5", "--steps", "10"], 1, 0, FILE_BYTES="9000")
    lines = said.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"cannot write checkpoint {folder}/checkpoints/step-000000005.pt: ")
    assert lines[0].endswith("; training goes on")
    records = events(folder, "checkpoint")
    assert [one["bytes"] for one in records] == [0, 0]
    assert all(one["failure"] for one in records)
    assert list((folder / "checkpoints").iterdir()) == []


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_ranks_refuse_together_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.pt").write_text("Buy milk.")
    line = refused(tmp_path, ["--resume", "notes.pt"], world_size=2)
    assert f"node0: resume: {tmp_path}/notes.pt is damaged, or no checkpoint" in line


def test_a_run_that_would_mix_its_checkpoints_with_anothers_is_refused(stopped: Path, tmp_path: Path) -> None:
    line = refused(tmp_path, ["--checkpoint_every", "4", "--checkpoint_dir", str(stopped / "checkpoints")])
    assert "step-000000010.pt is of an earlier run" in line
    assert "--resume" in line


def test_another_stream_of_samples_is_refused(stopped: Path, tmp_path: Path) -> None:
    line = refused(tmp_path, ["--resume", str(stopped / "checkpoints"), "--seed", "1"])
    assert "the checkpoint is of a run with seed=0 (now 1)" in line


@pytest.mark.parametrize(
    ("more", "variables", "expected"),
    [
        (["--resume", "STOPPED", "--steps", "9"], {}, "is at update 10, this run ends at 9"),
        (["--resume", "nowhere"], {}, "nowhere"),
        (["--resume", "STOPPED"], {"LENET": "1"}, "holds another network"),
        (["--checkpoint_every", "1"], {"ORCH_PACED": '{"samples_per_s": 1e6}'}, "paced"),
    ],
)
def test_what_cannot_go_on_is_one_line(
    stopped: Path, tmp_path: Path, more: list[str], variables: dict[str, str], expected: str
) -> None:
    more = [word.replace("STOPPED", str(stopped / "checkpoints")) for word in more]
    assert expected in refused(tmp_path, more, **variables)


def test_a_folder_of_images_that_has_changed_is_refused(tmp_path: Path) -> None:
    """One file more would be another permutation, another name another image at the same place."""
    trained_on = [f"train/{name}/{number}" for name in ("cat", "dog") for number in (1, 2, 3)]
    for name in [*trained_on, "val/cat/1", "val/dog/1"]:
        path = tmp_path / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (28, 28), len(name)).save(path)
    way = ["--data", "folder", "--data_dir", str(tmp_path / "images"), "--samples", "0", "--batch", "2"]
    finished(tmp_path / "stopped", [*way, "--checkpoint_every", "2", "--steps", "2", "--eval_every", "0"], 1)
    (tmp_path / "images/train/dog/2.png").rename(tmp_path / "images/train/dog/0.png")
    resume = [*way, "--resume", "../stopped/checkpoints"]
    assert "of other data: also 6 training samples, but different" in refused(tmp_path / "renamed", resume)
    (tmp_path / "images/train/cat/3.png").unlink()
    (tmp_path / "images/train/cat/2.png").unlink()
    assert "of other data: 6 training samples, not 4" in refused(tmp_path / "fewer", resume)


def written(folder: Path, **changed: Any) -> Path:
    random = [torch.zeros(2), torch.ones(2)]
    parts: dict[str, Any] = {
        "schema": 3,
        "settings": {"lr": 0.1},
        "data": "synthetic",
        "train_samples": 203,
        "world_size": 2,
        "names": ["a:0", "b:0"],
        "shares": [3, 2],
        "epoch": 1,
        "step": 2,
        "model": {"w": torch.arange(1000.0)},
        "optimizer": {"momentum_buffer": [None]},
        "scaler": {},
        "sums": [[1.0, 2.0, 3.0]] * 2,
        "own": [{"statistics.0": tensor} for tensor in random],
        "random": random,
    }
    write_file(folder / "step-000000009.pt", Checkpoint(**{**parts, **changed}))
    return folder / "step-000000009.pt"


def test_a_checkpoint_is_read_without_trust_in_torchs_own_words(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert torch.load(path, weights_only=True)["shares"] == [3, 2]
    saved, content, _ = read_file(tmp_path)
    assert torch.equal(saved.model["w"], torch.arange(1000.0))
    assert content == path.read_bytes()


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(500.0, 510.0).numpy().tobytes())] ^= 1
    with pytest.raises(TrainError, match=r"^resume: .*step-000000009.pt is damaged: the checksum of .* is wrong$"):
        parse(bytes(content), str(path))


def test_the_one_before_a_damaged_checkpoint_is_gone_on_from(whole: Path, stopped: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stopped / "checkpoints", tmp_path / "checkpoints")
    (folder / "step-000000010.pt").write_bytes((folder / "step-000000010.pt").read_bytes()[:-100])
    said = finished(tmp_path, ["--resume", str(folder), "--checkpoint_every", "20"])
    (line,) = [line for line in said.splitlines() if " is damaged" in line]
    assert line.startswith(f"resume: {folder}/step-000000010.pt is damaged")
    assert line.endswith("; trying the one before it")
    assert "after 8 updates" in said
    assert_goes_on_like(whole, tmp_path, first=8)
    kept = ["step-000000010.pt.damaged", "step-000000020.pt", "step-000000021.pt"]
    assert sorted(path.name for path in folder.iterdir()) == kept


def test_a_damaged_checkpoint_that_was_named_names_the_one_before_it(tmp_path: Path) -> None:
    before = written(tmp_path)
    (tmp_path / "step-000000012.pt").write_bytes(b"")
    with pytest.raises(TrainError, match=rf"12\.pt is damaged.*; the one before it is {before}$"):
        read_file(tmp_path / "step-000000012.pt")


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_a_file_that_was_cut_is_one_line(tmp_path: Path, part: float) -> None:
    content = written(tmp_path).read_bytes()
    with pytest.raises(TrainError, match=r"^resume: it is damaged, or no checkpoint") as caught:
        parse(content[: int(len(content) * part)], "it")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"schema": 4}, "is of a newer version \\(4, this trainer reads 3\\): update"),
        ({"schema": 1}, "is of an older version \\(1, this trainer reads 3\\): start again without it"),
        ({"epoch": "one"}, "is no checkpoint of this trainer"),
        ({"world_size": 3}, "is no checkpoint of this trainer"),
        ({"sums": [[1.0], [1.0]]}, "is no checkpoint of this trainer"),
        ({"own": [{"a": torch.zeros(1)}, {"a": torch.zeros(2)}]}, "is no checkpoint of this trainer"),
        ({"own": [{"a": 1}, {"a": 1}]}, "is no checkpoint of this trainer"),
        ({"optimizer": {"momentum_buffer": ["fast"]}}, "is no checkpoint of this trainer"),
    ],
)
def test_what_is_newer_or_of_another_form_is_one_line(tmp_path: Path, changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(TrainError, match=expected):
        read_file(written(tmp_path, **changed))


def test_the_first_releases_checkpoints_are_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = torch.load(path, weights_only=True)
    for momentum in ([torch.ones(3)], [None]):
        torch.save({**content, "schema": 2, "optimizer": None, "momentum": momentum}, path)
        found = read_file(path).checkpoint
        assert (found.schema, list(found.optimizer)) == (3, ["momentum_buffer"] if momentum[0] is not None else [])


def test_what_would_run_code_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, Any]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"schema": 1, "trap": Trap()}, tmp_path / "step-000000001.pt")
    with pytest.raises(TrainError, match="is damaged, or no checkpoint"):
        read_file(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_folder_without_a_checkpoint_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"no checkpoint in .*; one is written every `checkpoint_every` updates"):
        read_file(tmp_path)


def test_a_folder_that_cannot_be_made_is_reported_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match=r"checkpoint_dir: cannot use .*/file/below"):
        open_folder(tmp_path / "file" / "below", 0)


def test_ranks_that_torchrun_restarts_go_on_by_themselves(tmp_path: Path) -> None:
    """Nobody names the checkpoint: after a restart it is the newest of this very run."""
    metrics = f"{tmp_path}/{{rank}}.jsonl"
    launch = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m"]
    slow = ["--slow", "rank:0,at:start,ms:50", "--checkpoint_every", "4", "--checkpoint_dir", str(tmp_path / "kept")]
    words = [*launch, "trainer", *SMALL, *slow, "--eval_every", "0"]
    python = {"PYTHON_EXEC": quick_python(tmp_path / "quick", torchrun=True)}
    environment = {**os.environ, "ORCH_METRICS": metrics, "OMP_NUM_THREADS": "1", **python}
    with forks.start(forks.TORCHRUN, words, cwd=Path(__file__).parents[2], env=environment) as run:
        try:
            wait_until(lambda: len(losses(tmp_path, 1)) > 5)
            (rank,) = (pid for pid in ranks_with(metrics) if b"\0RANK=1\0" in environment_of(pid))
            os.kill(rank, signal.SIGKILL)
            assert run.wait(120) == 0
        finally:
            run.send_signal(signal.SIGTERM)
    assert len(events(tmp_path, "start")) == 2
    steps = [step["step"] for step in events(tmp_path, "step")]
    again = next(index for index, (one, two) in enumerate(itertools.pairwise(steps)) if two <= one) + 1
    assert steps[again] >= 4
    assert steps[again] % 4 == 0
    assert steps[again:] == list(range(steps[again], LAST))


def environment_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def ranks_with(metrics: str) -> list[int]:
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in found if f"\0ORCH_METRICS={metrics}\0".encode() in environment_of(pid)]


class Ran:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def legacy_tar(ran: Path) -> bytes:
    """What torch before 2.6 reads as a checkpoint of its first versions, whatever `weights_only` says."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            content = pickle.dumps(Ran(ran))
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def with_part(whole: bytes, name: str, content: bytes) -> bytes:
    """The zip with one more part."""
    buffer = io.BytesIO(whole)
    with zipfile.ZipFile(buffer, "a") as parts, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["tar in front, zip behind", "a tar", "a second pickle", "code", "another folder"])
def test_torch_is_shown_nothing_but_the_parts_that_it_writes_itself(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, ran = written(tmp_path).read_bytes(), tmp_path / "ran"
    top = zipfile.ZipFile(io.BytesIO(whole)).namelist()[0].partition("/")[0]
    content = {
        "tar in front, zip behind": lambda: legacy_tar(ran) + whole,
        "a tar": lambda: legacy_tar(ran),
        "a second pickle": lambda: with_part(whole, f"{top}/data.pkl", pickle.dumps(Ran(ran))),
        "code": lambda: with_part(whole, f"{top}/code/x.py", b""),
        "another folder": lambda: with_part(whole, "other/data.pkl", pickle.dumps(Ran(ran))),
    }[kind]()
    if kind == "tar in front, zip behind":
        assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None  # to `zipfile` it is whole
    shown = []
    monkeypatch.setattr(torch, "load", lambda *words, **options: shown.append(words))
    with pytest.raises(TrainError, match="is damaged, or no checkpoint"):
        parse(content, "it")
    assert shown == [] and not ran.exists()


# ---- on a second host ------------------------------------------------------------------------------------------------


def copied(folder: Path, arguments: list[str], world_size: int = 2, **more: str) -> Path:
    """Of a run whose checkpoints rank 0 keeps in `own`, the folder of their copies on another host."""
    kept = [*arguments, "--checkpoint_every", "4", "--checkpoint_dir", str(folder / "own")]
    there = str(folder / "there")
    finished(folder, kept, world_size, ORCH_CHECKPOINT_COPY="node1", ORCH_CHECKPOINTS=there, **more)
    return folder / "there"


@pytest.mark.parametrize(("world_size", "ways"), [(2, []), (3, ["--fidelity", "local", "--local_steps", "3"])])
def test_a_second_host_keeps_the_same_bytes(tmp_path: Path, world_size: int, ways: list[str]) -> None:
    there = copied(tmp_path, ["--steps", "10", *ways], world_size)
    files = {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()}
    assert [*sorted(files)] == ["step-000000008.pt", "step-000000010.pt"]
    assert {path.name: path.read_bytes() for path in there.iterdir()} == files
    made = [(one["name"], one["bytes"], one["failure"]) for one in events(tmp_path, "copy", 1)]
    assert made == [(one["name"], one["bytes"], None) for one in events(tmp_path, "checkpoint")]
    assert [events(tmp_path, "copy", rank) for rank in range(world_size) if rank != 1] == [[]] * (world_size - 1)


def test_a_copy_changes_nothing_and_is_gone_on_from_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    there = copied(tmp_path / "first", ["--steps", "10"])
    (tmp_path / "second").mkdir()
    finished(tmp_path / "second", ["--resume", str(there)])
    assert_goes_on_like(whole, tmp_path / "second", 10)


def test_a_second_host_whose_disk_is_full_is_one_line_and_keeps_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("no folder")
    said = ended(
        tmp_path, ["--checkpoint_every", "4", "--checkpoint_dir", str(tmp_path / "own")], 2, 0,
        ORCH_CHECKPOINT_COPY="node1", ORCH_CHECKPOINTS=str(tmp_path / "there"),
    )  # fmt: skip
    assert said[0] == "" and said[1].count("cannot keep a copy of checkpoint step-") == said[1].count("\n") > 1
    assert {one["failure"] for one in events(tmp_path, "copy", 1)} == {"File exists"}


@pytest.mark.parametrize(
    ("nodes", "wanted", "keeper"),
    [("aabb", "b", 2), ("abc", "c", 2), ("abc", "gone", 1), ("abc", "a", 1), ("aa", "a", None), ("a", "b", None)],
)
def test_who_keeps_the_copy(nodes: str, wanted: str, keeper: int | None) -> None:
    assert keeper_of([*nodes], wanted) == keeper
