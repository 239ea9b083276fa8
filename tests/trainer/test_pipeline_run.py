"""A whole run as a pipeline: its records, its evaluation, and checkpoints that any other strategy can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.results import load_timeline
from orchestrator.results.analyse import analyse
from tests.support.run_folders import Host, write_run
from tests.support.trainer_ranks import of_event, started, trained
from trainer.checkpoints import read_file
from trainer.shared import SettingsError, parse_settings

SHORT = ["--exp", "mnist_lenet", "--data", "synthetic", "--device", "cpu", "--samples", "176", "--batch", "32"]
SHORT += ["--epochs", "1", "--checkpoint_every", "3", "--augment", "none"]  # 6 updates, the last one of 16
PIPELINE = ["--strategy", "pipeline", "--accumulate", "8", "--stages", "node1:0,node0:1"]
SHORT_PACED = ["--samples", "64", "--batch", "16", "--epochs", "1"]  # 4 updates
ALONE = ["--strategy", "none", "--accumulate", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("piped")


@pytest.fixture(scope="module")
def piped(folder: Path) -> list[list[dict[str, Any]]]:
    return kept(folder / "piped", PIPELINE, 2)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[dict[str, Any]]]:
    return kept(folder / "alone", ALONE, 1)


def kept(folder: Path, arguments: list[str], ranks: int) -> list[list[dict[str, Any]]]:
    """The records of a run that leaves its checkpoints in the folder."""
    folder.mkdir()
    return trained(folder, [*SHORT, *arguments, "--checkpoint_dir", str(folder)], ranks)


def weights(folder: Path, updates: int) -> Any:
    saved, _, _ = read_file(folder / f"step-{updates:09}.pt")
    return {name: tensor.tolist() for name, tensor in saved.model.items()}, [
        tensor.tolist() for tensor in saved.optimizer["momentum_buffer"] if tensor is not None
    ]


def test_a_run_is_that_of_one_process(
    folder: Path, piped: list[list[dict[str, Any]]], alone: list[list[dict[str, Any]]]
) -> None:
    for updates in (3, 6):
        assert weights(folder / "piped", updates) == weights(folder / "alone", updates)
    (evaluated,) = of_event(alone[0], "eval")
    for rank in piped:
        (same,) = of_event(rank, "eval")
        assert {**same, "eval_s": 0} == {**evaluated, "eval_s": 0}


def test_samples_and_losses_add_up_over_the_stages(
    piped: list[list[dict[str, Any]]], alone: list[list[dict[str, Any]]]
) -> None:
    of_ranks = [of_event(rank, "step") for rank in piped]
    for last, first, whole in zip(*of_ranks, of_event(alone[0], "step"), strict=True):
        assert (last["samples"], first["samples"]) == (0, whole["samples"])
        assert first["loss"] == 0
        assert last["loss"] == pytest.approx(whole["loss"])
        for line in (last, first):
            parts = (line[f"{name}_ms"] for name in ("load", "compute", "exposed", "optim"))
            assert sum(parts) == pytest.approx(line["t_ms"], abs=0.01)


def test_a_stage_says_for_whom_it_waited_and_what_it_did_when(piped: list[list[dict[str, Any]]]) -> None:
    for last, first in zip(*(of_event(rank, "step") for rank in piped), strict=True):
        assert last["bubble_behind_ms"] == first["bubble_before_ms"] == 0  # nobody is there
        for line in (last, first):
            assert 0 <= line["bubble_before_ms"] + line["bubble_behind_ms"] <= line["exposed_ms"] + 0.01
    assert sum(line["bubble_before_ms"] for line in of_event(piped[0], "step")) > 0
    assert all(sum(line["wire_ms"] for line in of_event(rank, "step")) > 0 for rank in piped)
    (last,), (first,) = (of_event(rank, "tasks") for rank in piped)
    assert (last["step"], first["step"], last["left_out"]) == (3, 3, 0)  # the first one after the warm-up
    steps = [of_event(rank, "step")[3] for rank in piped]
    for event, line, (came, sent) in zip(
        (last, first), steps, (("forward", "backward"), ("backward", "forward")), strict=True
    ):
        rows = event["tasks"]
        for task in ("forward", "backward", "weights"):
            assert [row[1] for row in rows if row[0] == task] == list(range(8))
        assert {row[0] for row in rows if row[4] is not None} == {came}
        assert {row[0] for row in rows if row[5] is not None} == {sent}
        assert all(0 <= row[2] <= row[3] <= line["t_ms"] for row in rows)
        assert all(row[4] <= row[2] for row in rows if row[4] is not None)
        assert all(row[2] <= row[5] <= row[3] for row in rows if row[5] is not None)
        computed = sum(row[3] - row[2] for row in rows if row[1] is not None)
        assert 0 < computed <= line["compute_ms"] + 0.1


def test_a_real_runs_step_is_put_on_one_clock(tmp_path: Path, piped: list[list[dict[str, Any]]]) -> None:
    hosts = [Host("node0", gpu=None), Host("node1", gpu=None)]
    run = write_run(tmp_path / "run", hosts, dict(enumerate(piped)), settings={"strategy": "pipeline", "batch": 32})
    summary = analyse(run)
    assert [(stage.node, stage.blocks, stage.waits_for) for stage in summary.stages][1] == ("node0", "1-1", "node1")
    drawn = load_timeline(run.timeline)
    assert drawn and [(lane.node, lane.stage, len(lane.bars)) for lane in drawn.lanes] == [
        ("node1", 0, 3 * 8 + 2),
        ("node0", 1, 3 * 8 + 2),
    ]
    assert len(drawn.messages) == 16
    assert all(one.sent_ms <= one.came_ms for one in drawn.messages)
    forward, backward = (
        {one.number: one for one in drawn.messages if one.task == task} for task in ("forward", "backward")
    )
    assert all(forward[number].came_ms < backward[number].sent_ms for number in range(8))


def test_nobody_waits_for_the_loss_that_rank_0_says(tmp_path: Path) -> None:
    """The last stage, of which it comes, is slow to compute its own weights' gradients when all others are done."""
    paces = [{"ORCH_PACED": f'{{"samples_per_s": {speed}}}'} for speed in (2000, 4)]
    stages = ["--strategy", "pipeline", "--accumulate", "2", "--stages", "node0:0,node1:1"]
    first, last = trained(tmp_path, [*SHORT[:6], *SHORT_PACED, *stages], 2, of_ranks=paces)
    (rows,), (slow,) = (
        [row for event in of_event(rank, "tasks") for row in [event["tasks"]]] for rank in (first, last)
    )
    weights_ms = max(row[3] - row[2] for row in slow if row[0] == "weights")
    over_ms = max(row[3] for row in rows if row[1] is not None)
    (summing_ms,) = (row[2] for row in rows if row[0] == "sum")
    assert summing_ms - over_ms < weights_ms / 2


def test_either_goes_on_from_the_others_checkpoint(
    folder: Path, piped: list[list[dict[str, Any]]], alone: list[list[dict[str, Any]]]
) -> None:
    for arguments, source, ranks in ((ALONE, "piped", 1), (PIPELINE, "alone", 2)):
        start = folder / source / "step-000000003.pt"
        there = folder / f"from-{source}"
        kept(there, [*arguments, "--resume", str(start)], ranks)
        assert weights(there, 6) == weights(folder / source, 6)


def test_a_scaled_loss_is_taken_back_on_every_stage(folder: Path, alone: list[list[dict[str, Any]]]) -> None:
    """Only the last one scales it. Gradients travel in fp16, so that they are close and no more."""
    kept(folder / "scaled", [*PIPELINE, "--amp", "fp16"], 2)
    found, whole = (weights(folder / name, 6)[0] for name in ("scaled", "alone"))
    for name, values in whole.items():
        assert torch.allclose(torch.tensor(found[name]), torch.tensor(values), atol=1e-3), name


def test_a_stage_that_the_gpu_has_no_memory_for_is_refused_in_a_line(tmp_path: Path) -> None:
    paced = [{"ORCH_PACED": '{"samples_per_s": 1000, "memory_bytes": 100000}'}] * 2
    with started(tmp_path, [*SHORT[:-4], *PIPELINE], 2, of_ranks=paced) as ranks:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [1, 1]
    assert "out of memory: blocks 1 to 1 with 4 samples per micro-batch take" in said[0]
    assert "give its host fewer blocks, or use a larger accumulate" in said[0]


def test_a_network_that_no_gpu_holds_alone_trains_as_a_pipeline(tmp_path: Path) -> None:
    paced = [{"ORCH_PACED": '{"samples_per_s": 5000, "memory_bytes": 780000}'}] * 2
    with started(tmp_path, [*SHORT[:-4], "--strategy", "ddp"], 2, of_ranks=paced) as ranks:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    for line in said:
        assert line.startswith("error: node0: out of memory: 16 samples take ") and line.count("\n") == 1
        assert line.endswith("by itself: strategy=pipeline gives each host a part of it\n")
    cut = tmp_path / "cut"
    cut.mkdir()
    lines = trained(cut, [*SHORT[:-4], *PIPELINE, "--in_flight", "3"], 2, of_ranks=paced)
    for rank in lines:
        assert len(of_event(rank, "step")) == 6
        (end,) = of_event(rank, "end")
        assert end["status"] == "succeeded" and end["peak_memory_bytes"] < 780_000


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ({"stages": "a:0-3"}, "stages: does nothing with strategy ddp; use pipeline"),
        ({"in_flight": "3"}, "in_flight: does nothing with strategy ddp; use pipeline"),
        ({"smaller_first": "0.3"}, "smaller_first: does nothing with strategy ddp; use pipeline"),
        ({"strategy": "pipeline", "smaller_first": "1"}, "smaller_first: 1.0 is too large; less than 1"),
        ({"strategy": "pipeline", "stages": "a"}, "stages: 'a': expected a host and its blocks"),
        ({"strategy": "pipeline", "shares": "auto"}, "shares: auto moves samples from rank to rank"),
        ({"strategy": "pipeline", "sync_bn": "true"}, "sync_bn: a pipeline's BatchNorm sees a micro-batch"),
        ({"strategy": "pipeline", "profile_s": "3"}, "profile_s: measures the whole network on each rank"),
        ({"strategy": "pipeline", "fidelity": "compressed"}, "fidelity: compressed goes with strategy ddp"),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_said(pairs: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said.replace("(", r"\(")):
        parse_settings("mnist_lenet", pairs)
