"""Whole runs whose layers are cut: their records, their evaluation, and checkpoints that other strategies can read."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.remote.logs import is_secondary
from orchestrator.results.analyse import analyse
from tests.support.run_folders import Host, write_run
from tests.support.trainer_ranks import of_event, records, started, trained
from trainer.checkpoints import read_file
from trainer.shared import SettingsError, parse_settings

SHORT = ["--exp", "mnist_lenet", "--data", "synthetic", "--device", "cpu", "--samples", "176", "--batch", "32"]
SHORT += ["--epochs", "1", "--augment", "none"]  # 6 updates, the last one of 16
UNJUDGED = ["--eval_every", "0"]
TENSOR = ["--strategy", "tensor", "--shares", "node0=5,node1=2"]
ALONE = ["--strategy", "none"]
DDP = ["--strategy", "ddp", "--bucket_mib", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor")


@pytest.fixture(scope="module")
def sliced(folder: Path) -> list[list[dict[str, Any]]]:
    return kept(folder / "sliced", [*TENSOR, "--accumulate", "2"], 2)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[dict[str, Any]]]:
    return kept(folder / "alone", [*ALONE, "--accumulate", "2"], 1)


def kept(folder: Path, arguments: list[str], ranks: int, every: int = 3) -> list[list[dict[str, Any]]]:
    """The records of a run that leaves its checkpoints in the folder."""
    folder.mkdir()
    checkpoints = ["--checkpoint_every", str(every), "--checkpoint_dir", str(folder)]
    return trained(folder, [*SHORT, *arguments, *checkpoints], ranks)


def weights(folder: Path, updates: int) -> dict[str, torch.Tensor]:
    """And what the optimiser remembers, by name."""
    saved, _, _ = read_file(folder / f"step-{updates:09}.pt")
    moved = {
        f"{kind} {number}": tensor
        for kind, tensors in saved.optimizer.items()
        for number, tensor in enumerate(tensors)
        if tensor is not None
    }
    assert len(moved) == 10 * len(saved.optimizer)
    return saved.model | moved


def furthest(one: Path, other: Path, updates: int = 6) -> float:
    first, second = weights(one, updates), weights(other, updates)
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def test_a_run_is_that_of_one_process(
    folder: Path, sliced: list[list[dict[str, Any]]], alone: list[list[dict[str, Any]]]
) -> None:
    for updates in (3, 6):
        assert furthest(folder / "sliced", folder / "alone", updates) <= 1e-6
    (evaluated,) = of_event(alone[0], "eval")
    for rank in sliced:
        (same,) = of_event(rank, "eval")
        assert same["samples"] == evaluated["samples"] and same["per_class"] == evaluated["per_class"]
        assert same["loss"] == pytest.approx(evaluated["loss"])


def test_samples_and_losses_count_once_and_work_adds_up(
    sliced: list[list[dict[str, Any]]], alone: list[list[dict[str, Any]]]
) -> None:
    for first, second, whole in zip(*(of_event(rank, "step") for rank in (*sliced, *alone)), strict=True):
        assert (first["samples"], second["samples"], second["loss"]) == (whole["samples"], 0, 0)
        assert first["loss"] == pytest.approx(whole["loss"])
        for line in (first, second):
            parts = (line[f"{name}_ms"] for name in ("load", "compute", "exposed", "optim"))
            assert sum(parts) == pytest.approx(line["t_ms"], abs=0.01)
            assert line["exposed_ms"] > 0 and line["bubble_before_ms"] is None
    (first,), (second,) = (of_event(rank, "start") for rank in sliced)
    assert first["work"] + second["work"] == pytest.approx(1) and 0.6 < first["work"] < 0.8
    assert first["parameters"] + second["parameters"] == 61_706
    (epoch,) = of_event(sliced[1], "epoch")
    assert epoch["samples"] == 176


def test_a_report_counts_each_rank_by_its_part_of_the_work(tmp_path: Path, sliced: list[list[dict[str, Any]]]) -> None:
    hosts = [Host("node0", gpu=None), Host("node1", gpu=None)]
    run = write_run(tmp_path / "run", hosts, dict(enumerate(sliced)), settings={"strategy": "tensor", "batch": 32})
    summary = analyse(run)
    assert summary.samples_total == 176 and not summary.stages
    part = summary.nodes[0].samples_per_s / summary.samples_per_s
    assert part == pytest.approx(of_event(sliced[0], "start")[0]["work"], abs=0.02)


@pytest.mark.parametrize("shares", ["node0=2,node1=5", "node0=0,node1=1"])
def test_ddp_and_slices_go_on_from_each_others_checkpoint(
    folder: Path, sliced: list[list[dict[str, Any]]], alone: list[list[dict[str, Any]]], shares: str
) -> None:
    """Without BatchNorm an update of ddp is that of one process as well. With other shares than before; even with none,
    which leaves a rank the sums.
    """
    ddp, again = folder / f"ddp-{shares}", folder / f"again-{shares}"
    kept(ddp, [*DDP, *UNJUDGED, "--steps", "4", "--resume", str(folder / "sliced" / "step-000000003.pt")], 2, every=2)
    kept(again, ["--strategy", "tensor", *UNJUDGED, "--shares", shares, "--resume", str(ddp / "step-000000004.pt")], 2)
    assert furthest(again, folder / "alone") <= 1e-6


@pytest.mark.parametrize("way", [TENSOR, ["--strategy", "pipeline"]])
def test_what_adamw_remembers_of_parts_is_the_whole_networks(folder: Path, way: list[str]) -> None:
    """A run in one process goes on with it, and parts go on with that of one process."""
    adamw = ["--optimizer", "adamw", "--lr", "0.001", "--weight_decay", "0.1", *UNJUDGED]
    cut, alone = folder / f"adamw-{way[1]}", folder / f"adamw-alone-{way[1]}"
    kept(cut, [*adamw, *way], 2)
    kept(alone, [*adamw, *ALONE], 1)
    assert read_file(alone / "step-000000006.pt").checkpoint.optimizer.keys() == {"exp_avg", "exp_avg_sq", "step"}
    for updates in (3, 6):
        assert furthest(cut, alone, updates) <= 1e-5
    for source, strategy, ranks in ((cut, ALONE, 1), (alone, way, 2)):
        again = folder / f"again-{way[1]}-{ranks}"
        kept(again, [*adamw, *strategy, "--resume", str(source / "step-000000003.pt")], ranks)
        assert furthest(again, alone) <= 1e-5


def test_a_scaled_loss_is_taken_back_on_every_rank(folder: Path) -> None:
    """At a small rate: after large steps, the two are so far apart that a ReLU passes a value in one of them alone."""
    how = ["--accumulate", "2", "--amp", "fp16", "--channels_last", "on", "--steps", "3", "--lr", "0.01", *UNJUDGED]
    kept(folder / "scaled", [*TENSOR, *how], 2)
    kept(folder / "scaled-alone", [*ALONE, *how], 1)
    assert furthest(folder / "scaled", folder / "scaled-alone", 3) <= 2e-3


def test_a_pause_before_calls_counts_as_computing(tmp_path: Path) -> None:
    """lenet's five layers are gathered once each, four have gradients of inputs added up."""
    slow = ["--slow", "rank:1,at:call,ms:20", *UNJUDGED, "--steps", "2"]
    first, second = trained(tmp_path, [*SHORT, *TENSOR, *slow], 2)
    for waiting, held_up in zip(*(of_event(rank, "step") for rank in (first, second)), strict=True):
        assert held_up["compute_ms"] >= 9 * 20 and waiting["exposed_ms"] >= 9 * 20 - waiting["compute_ms"]


def test_slices_that_the_gpu_has_no_memory_for_are_refused_in_a_line(tmp_path: Path) -> None:
    paced = [{"ORCH_PACED": '{"samples_per_s": 1000, "memory_bytes": 600000}'}] * 2
    with started(tmp_path, [*SHORT, *TENSOR], 2, of_ranks=paced) as ranks:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [1, 1]
    assert "out of memory: its slices and the activations of 32 samples take" in said[0]


def test_a_paced_rank_meets_one_that_computes(tmp_path: Path) -> None:
    """They exchange the same numbers in the same order, and none is learnt from."""
    paced = [{"ORCH_PACED": '{"samples_per_s": 2000}'}, {}]
    lines = trained(tmp_path, [*SHORT, *TENSOR, *UNJUDGED, "--steps", "3"], 2, of_ranks=paced)
    for rank in lines:
        assert [line["loss"] for line in of_event(rank, "step")] == [None] * 3
    share_ms = 32 / 2000 * 1000 * of_event(lines[0], "start")[0]["work"]
    assert all(line["compute_ms"] >= 0.95 * share_ms for line in of_event(lines[0], "step"))


def test_a_killed_rank_ends_all_and_no_other_blames_itself(tmp_path: Path) -> None:
    long = ["--data", "synthetic", "--samples", "64", "--epochs", "10000", "--eval_every", "0", "--batch", "16"]
    with started(tmp_path, ["--exp", "mnist_lenet", "--device", "cpu", *long, *TENSOR], 2) as ranks:
        while len(of_event(records(tmp_path, 0), "step")) < 5:
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.02)
        os.kill(ranks[1].pid, signal.SIGKILL)
        said = [rank.communicate(timeout=60)[1].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -9]
    assert is_secondary(said[0])


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (
            {"shares": "auto"},
            "shares: auto moves samples from rank to rank, but tensor's ranks take all of them; use measured",
        ),
        ({"sync_bn": "true"}, "sync_bn: tensor's ranks each see the whole batch already"),
        ({"profile_s": "3"}, "profile_s: measures the whole network on each rank"),
        ({"stages": "a:0-3"}, "stages: does nothing with strategy tensor; use pipeline"),
        ({"fidelity": "local"}, "fidelity: local goes with strategy ddp, parameter_average, pipeline, not with tensor"),
    ],
)
def test_what_does_not_go_with_slices_is_said(pairs: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_settings("mnist_lenet", {"strategy": "tensor", **pairs})
