"""Whole runs of `python -m trainer`: records, console, failures and signals, over real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")

import torch

from tests.support import forks
from tests.support.trainer_ranks import ROOT, environment, of_event, real_mnist, records, started, trained
from trainer.compute.microbatches import MicroBatches
from trainer.compute.models import build_model
from trainer.data import SampleStream, loader_processes
from trainer.ranks import read_rank_info
from trainer.setup import check_batch_norm, check_pairs
from trainer.shared import EVENT_FIELDS, TrainError, parse_settings
from trainer.train import train_epoch

SYNTHETIC = ["--exp", "mnist_lenet", "--data", "synthetic", "--device", "cpu"]
TORCHRUN = ["--standalone", "--nproc-per-node", "2", "-m", "trainer"]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Two epochs over 203 samples in batches of 64: three full ones and one of 11, in shares of 6 and 5."""
    folder = tmp_path_factory.mktemp("run")
    command = [*TORCHRUN, *SYNTHETIC, "--samples", "203", "--epochs", "2", "--eval_every", "2"]
    command += ["--loader", "workers", "--num_workers", "1"]
    return forks.run(forks.TORCHRUN, command, cwd=ROOT, env=environment(folder)), folder


def test_torchrun_trains_and_says_so_without_a_warning(run_of_two: Any) -> None:
    result, _ = run_of_two
    assert result.returncode == 0, result.stderr
    trainer_words = [line for line in result.stderr.splitlines() if "master_addr is only used" not in line]
    assert trainer_words == []
    first, *_, last = result.stdout.splitlines()
    assert first == "mnist_lenet: lenet on synthetic, batch 64 over 2 ranks, strategy ddp, fidelity exact"
    assert last.startswith("done: 8 steps in ")
    assert "samples/s, accuracy " in last


def test_every_line_has_the_documented_fields_and_the_order_of_events(run_of_two: Any) -> None:
    for rank in range(2):
        lines = records(run_of_two[1], rank)
        for line in lines:
            assert set(line) == {"event", *EVENT_FIELDS[line["event"]]}
        events = [line["event"] for line in lines]
        assert events == ["start", *["step"] * 4, "epoch", *["step"] * 4, "epoch", "eval", "end"]
        assert [line["step"] for line in of_event(lines, "step")] == list(range(8))
        assert lines[-1]["status"] == "succeeded"
        assert lines[-1]["message"] is None


def test_the_samples_of_all_ranks_add_up_to_the_data_set(run_of_two: Any) -> None:
    steps = [of_event(records(run_of_two[1], rank), "step") for rank in range(2)]
    assert [[step["samples"] for step in lines] for lines in steps] == [[32, 32, 32, 6] * 2, [32, 32, 32, 5] * 2]
    for epoch in range(2):
        assert sum(step["samples"] for lines in steps for step in lines if step["epoch"] == epoch) == 203


def test_the_loss_of_an_epoch_is_that_of_all_ranks_samples(run_of_two: Any) -> None:
    lines = [records(run_of_two[1], rank) for rank in range(2)]
    for epoch in range(2):
        total = sum(step["loss"] for rank in lines for step in of_event(rank, "step") if step["epoch"] == epoch)
        for rank in lines:
            record = of_event(rank, "epoch")[epoch]
            assert (record["epoch"], record["steps"], record["samples"]) == (epoch, 4, 203)
            assert record["loss"] == pytest.approx(total / 203)


def test_the_phases_of_a_step_add_up_to_it_and_the_steps_to_the_epoch(run_of_two: Any) -> None:
    lines = records(run_of_two[1], 0)
    for step in of_event(lines, "step"):
        parts = (step["load_ms"], step["compute_ms"], step["exposed_ms"], step["optim_ms"])
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(step["t_ms"], abs=0.01)
    epoch = of_event(lines, "epoch")[1]
    steps_s = sum(step["t_ms"] for step in of_event(lines, "step") if step["epoch"] == 1) / 1000
    assert epoch["epoch_s"] / 2 < steps_s <= epoch["epoch_s"]


def test_the_start_record_says_who_runs_what_where(run_of_two: Any) -> None:
    for rank in range(2):
        start = records(run_of_two[1], rank)[0]
        assert (start["schema"], start["rank"], start["local_rank"], start["world_size"]) == (1, rank, rank, 2)
        assert (start["device"], start["backend"], start["nccl"]) == ("cpu", "gloo", None)
        assert (start["parameters"], start["gradient_bytes"], start["batch_per_rank"]) == (61_706, 246_824, 32)
        assert start["settings"]["samples"] == 203
        assert start["host"] == socket.gethostname()


def test_every_test_sample_is_evaluated_once(run_of_two: Any) -> None:
    (own,), (other,) = (of_event(records(run_of_two[1], rank), "eval") for rank in range(2))
    assert own["samples"] == 10_000
    assert own["accuracy"] == pytest.approx(sum(own["per_class"]) / 10)  # 1,000 of each class
    assert {**own, "eval_s": 0} == {**other, "eval_s": 0}


def test_what_holds_a_rank_up_between_calls_is_its_own_computing(tmp_path: Path) -> None:
    """LeNet has ten parameters, and so ten calls an update."""
    slow = ["--strategy", "allreduce", "--slow", "rank:0,at:call,ms:20", "--steps", "3", "--eval_every", "0"]
    with started(tmp_path, [*SYNTHETIC, *slow]) as (alone,):
        alone.communicate(timeout=60)
    steps = of_event(records(tmp_path, 0), "step")
    assert len(steps) == 3
    for step in steps:
        assert step["compute_ms"] >= 200
        assert step["exposed_ms"] < step["t_ms"] - 200
        parts = [step[name] for name in ("load_ms", "compute_ms", "exposed_ms", "optim_ms")]
        assert sum(parts) == pytest.approx(step["t_ms"], abs=0.1)


def test_absent_data_end_every_rank_with_the_same_line(tmp_path: Path) -> None:
    arguments = ["--exp", "mnist_lenet", "--device", "cpu", "--data_dir", str(tmp_path / "nowhere")]
    with started(tmp_path, arguments, world_size=2) as processes:
        errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert len(set(errors)) == 1
    (line,) = errors[0].splitlines()
    assert line.startswith(f"error: node0: no mnist data in {tmp_path / 'nowhere'}")
    assert [records(tmp_path, rank)[-1]["status"] for rank in range(2)] == ["failed", "failed"]
    assert records(tmp_path, 1)[-1]["message"] == line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("signum", "exit_code", "loader"), [(signal.SIGINT, 130, "workers"), (signal.SIGTERM, 143, "resident")]
)
def test_a_signal_ends_a_run_with_a_record_and_its_exit_code(
    tmp_path: Path, signum: int, exit_code: int, loader: str
) -> None:
    arguments = [*SYNTHETIC, "--epochs", "100", "--loader", loader, "--num_workers", "1"]
    with started(tmp_path, arguments) as (process,):
        wait_until(lambda: len(records(tmp_path, 0)) > 5)
        process.send_signal(signum)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == exit_code
    assert errors.splitlines() == [f"interrupted by {signal.Signals(signum).name}"]
    assert records(tmp_path, 0)[-1]["status"] == "interrupted"


def test_a_signal_ends_a_rank_that_waits_for_a_frozen_one(tmp_path: Path) -> None:
    with started(tmp_path, [*SYNTHETIC, "--epochs", "100", "--num_workers", "0"], world_size=2) as (process, frozen):
        wait_until(lambda: len(records(tmp_path, 0)) > 5)
        frozen.send_signal(signal.SIGSTOP)
        counts: list[int] = []
        wait_until(lambda: counts.append(len(records(tmp_path, 0))) or counts[-20:] == [counts[-1]] * 20)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 143
        assert records(tmp_path, 0)[-1]["status"] == "interrupted"


# ---- paced ranks --------------------------------------------------------------------------------------------------


def test_a_paced_rank_keeps_its_pace_learns_nothing_and_says_so(tmp_path: Path) -> None:
    """64 samples at 640 a second: 100 ms a step, and 60 of the brake on top, which no deadline may swallow."""
    pace = {"ORCH_PACED": json.dumps({"samples_per_s": 640})}
    arguments = [*SYNTHETIC, "--steps", "6", "--slow", "rank:0,at:backward,ms:60"]
    with started(tmp_path, arguments, of_ranks=[pace]) as (rank,):
        said, errors = rank.communicate(timeout=60)
    assert (rank.returncode, errors) == (0, "")
    assert "(paced, not computed)" in said
    assert "accuracy" not in said
    lines = records(tmp_path, 0)
    assert [line["event"] for line in lines] == ["start", *["step"] * 6, "epoch", "end"]
    assert {line["loss"] for line in lines if "loss" in line} == {None}
    for step in of_event(lines, "step"):
        assert step["compute_ms"] >= 159
        assert step["optim_ms"] >= 1
    start, end = lines[0], lines[-1]
    assert (start["paced"], start["device"], start["parameters"], start["gradient_bytes"]) == (
        True,
        "cpu",
        61_706,
        246_824,
    )
    assert end["valid"] is (end["lateness"] <= 0.01)
    # LeNet's weights, gradients and momentum, and 64 samples at 48,080 bytes: not what this process takes.
    assert end["peak_memory_bytes"] == 3 * 246_824 + 64 * 48_080


def test_one_paced_rank_among_real_ones_means_no_loss_for_anybody(tmp_path: Path) -> None:
    """And a pace that no CPU keeps, 3 microseconds a step, is reported as the CPU's fault."""
    pace = json.dumps({"samples_per_s": 10**7})
    real, paced = trained(tmp_path, [*SYNTHETIC, "--steps", "5"], 2, of_ranks=[{}, {"ORCH_PACED": pace}])
    for lines in (real, paced):
        assert [line["event"] for line in lines] == ["start", *["step"] * 5, "epoch", "end"]
        assert {line["loss"] for line in lines if "loss" in line} == {None}
        assert lines[-1]["status"] == "succeeded"
    assert (real[0]["paced"], paced[0]["paced"]) == (False, True)
    assert (real[-1]["lateness"], real[-1]["valid"]) == (None, None)
    assert paced[-1]["lateness"] > 1
    assert paced[-1]["valid"] is False


def test_a_pace_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with started(tmp_path, SYNTHETIC, of_ranks=[{"ORCH_PACED": "fast"}]) as (rank,):
        _, errors = rank.communicate(timeout=60)
    assert rank.returncode == 1
    (line,) = errors.splitlines()
    assert line.startswith("error: ORCH_PACED is 'fast'")


def test_a_lone_sample_for_batch_norm_is_refused_before_training() -> None:
    settings = parse_settings("resnet152_cifar", {})
    model = build_model("resnet152", settings.data_set.shape, 10)
    check_batch_norm(model, SampleStream(size=100, batch=10, shares=(8, 2), seed=0))
    for stream in (SampleStream(101, 10, (10,), seed=0), SampleStream(100, 10, (9, 1), seed=0)):
        with pytest.raises(TrainError, match="choose another batch than 10"):
            check_batch_norm(model, stream)
    check_batch_norm(model, SampleStream(102, 10, (5, 5), seed=0, pairs=True))
    with pytest.raises(TrainError, match="choose another batch than 10"):  # a share that was asked for is not changed
        check_batch_norm(model, SampleStream(100, 10, (9, 1), seed=0, pairs=True))
    with pytest.raises(TrainError, match=r"choose another batch than 10$"):  # no sync_bn where it would be refused
        check_batch_norm(model, SampleStream(101, 10, (10,), seed=0), may_sync=False)


def test_a_lone_sample_in_a_micro_batch_is_refused_for_batch_norm_alone() -> None:
    parts = MicroBatches(0, (None, 1), together=False)
    with pytest.raises(TrainError, match="local_batch=2"):
        check_pairs(build_model("resnet152", (3, 32, 32), 10), parts, (8, 2))
    check_pairs(build_model("lenet", (1, 28, 28), 10), parts, (8, 2))
    check_pairs(build_model("resnet152", (3, 32, 32), 10), parts, (10, 0))


def test_resnet152_takes_its_steps_on_two_ranks(tmp_path: Path) -> None:
    arguments = ["--exp", "resnet152_cifar", "--data", "synthetic", "--batch", "4", "--steps", "2", "--eval_every", "0"]
    with started(tmp_path, [*arguments, "--num_workers", "0", "--device", "cpu"], world_size=2) as processes:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    assert errors == ["", ""]
    lines = records(tmp_path, 1)
    assert lines[0]["parameters"] == 58_164_298
    assert [line["event"] for line in lines] == ["start", "step", "step", "epoch", "end"]


@pytest.mark.skipif(real_mnist() is None, reason="no MNIST; set ORCH_TEST_MNIST to the folder that holds MNIST/raw")
def test_one_epoch_of_mnist_on_two_ranks_passes_95_percent(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in (real_mnist() or tmp_path).glob("MNIST/raw/*"):
        shutil.copyfile(file, raw / file.name)
    arguments = ["--exp", "mnist_lenet", "--epochs", "1", "--num_workers", "0", "--device", "cpu"]
    lines = trained(tmp_path, [*arguments, "--data_dir", str(tmp_path)], 2)
    assert sum(step["samples"] for rank in lines for step in of_event(rank, "step")) == 60_000
    (evaluation,) = of_event(lines[0], "eval")
    assert evaluation["samples"] == 10_000
    assert evaluation["accuracy"] > 0.95


@pytest.mark.parametrize(
    ("wanted", "device", "ranks_here", "processes"),
    [
        (-1, "cpu", 1, 0),
        (-1, "cuda", 1, 4),
        (-1, "cuda", 4, 2),
        (-1, "cuda", 16, 0),
        (3, "cpu", 1, 3),
        (0, "cuda", 1, 0),
    ],
)
def test_loaders_take_no_core_that_a_rank_computes_on(monkeypatch, wanted, device, ranks_here, processes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    info = read_rank_info({"LOCAL_WORLD_SIZE": str(ranks_here)})
    assert loader_processes(wanted, info, torch.device(device)) == processes


def test_an_experiment_trains_and_evaluates_with_its_own_defaults(tmp_path):
    (lines,) = trained(tmp_path, [*SYNTHETIC, "--samples", "128", "--epochs", "1"])
    assert of_event(lines, "start")[0]["settings"]["num_workers"] == 0
    assert of_event(lines, "eval")
    assert of_event(lines, "end")[0]["status"] == "succeeded"


def test_label_smoothing_gives_every_class_its_part_of_the_loss():
    """Of the label 1 - e, of all classes e between them: Szegedy et al. 2016, section 7."""
    logits, labels, part = torch.randn(5, 10, generator=torch.manual_seed(1)), torch.tensor([0, 3, 9, 9, 1]), 0.3
    losses: list[torch.Tensor] = []
    settings = parse_settings("mnist_lenet", {"label_smoothing": str(part)})
    session: Any = SimpleNamespace(
        run=SimpleNamespace(settings=settings),
        batches=lambda: [(logits, labels)],
        learn=lambda outputs, labels, loss_sum: losses.append(loss_sum(outputs, labels)),
    )
    train_epoch(session)
    log_p = logits.log_softmax(dim=1)
    expected = -(1 - part) * log_p[range(5), labels].sum() - part * log_p.mean(dim=1).sum()
    torch.testing.assert_close(losses, [expected])
