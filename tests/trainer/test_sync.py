"""Steps of three ranks over real Gloo: who waits for whom and where it is recorded, who is refused, what is counted."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.free_port import free_port

pytest.importorskip("torch")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader

from trainer.compute.batch_norm_kernels import average_running_statistics
from trainer.compute.timer import CpuTimer
from trainer.ranks import RankInfo, join, together
from trainer.ranks.process_group import leave
from trainer.session import Session
from trainer.setup import assemble
from trainer.shared import PLACES, STRATEGIES, MetricsWriter, Pace, TrainError, parse_settings
from trainer.shared.settings import Settings
from trainer.strategies import build_strategy, local_loss, no_loss, weighted, without_effect
from trainer.train import train_epoch
from trainer.training import judged
from trainer.training.run import Run

WORLD_SIZE = 3
CPU = torch.device("cpu")
SLOW_S = 0.5
BRAKED_MS = 400
NEWEST_FSDP = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
TIMED = ("ddp", "allreduce", "reduce_scatter", "parameter_average", *(["fsdp"] if NEWEST_FSDP else []))
BRAKED = ("ddp", "allreduce", "parameter_average")
PACED = tuple(name for name in STRATEGIES if name not in ("none", "dp", "fsdp", "horovod", "pipeline", "tensor"))


def samples() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn((10, 1, 3, 4), generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 3, (10,), generator=generator)


def settings_for(strategy: str) -> Settings:
    return parse_settings("mnist_lenet", {"strategy": strategy, "bucket_mib": "0.0001", "num_workers": "0"})


class SlowForward(nn.Linear):
    """Rank 0 computes for SLOW_S longer than the others."""

    def forward(self, images: Any) -> Any:
        if dist.get_rank() == 0:
            time.sleep(SLOW_S)
        return super().forward(images.flatten(1))


def compute_and_exposed_s(strategy_name: str, group: Any) -> tuple[float, float]:
    timer = CpuTimer()
    strategy = build_strategy(settings_for(strategy_name), SlowForward(12, 3).double(), group, timer)
    images, labels = samples()
    dist.barrier()
    begin = timer.mark()
    computed = strategy.backward(local_loss(strategy.model, images[:2], labels[:2]), 2, 2 * WORLD_SIZE).computed
    strategy.after_update()
    return timer.ms(begin, computed) / 1000, timer.ms(computed, timer.mark()) / 1000


def set_up(group: Any, rank: int, path: Path | None = None, pace: Pace | None = None, **more: str) -> Run:
    """As `train` would, in the group that is already there."""
    assemble.join = lambda *_: group
    pairs = {"data": "synthetic", "device": "cpu", "num_workers": "0", "batch": "12", "samples": "60", **more}
    info = RankInfo(rank, rank, WORLD_SIZE, WORLD_SIZE, "vm", f"node{rank}", None, None, pace)
    return assemble.set_up(parse_settings("mnist_lenet", pairs), info, MetricsWriter(path))


def braked_steps(group: Any, rank: int, folder: str, strategy: str, place: str) -> tuple[list[Any], list[str]]:
    """Step lines of a run in which rank 1 is held up; and what this rank did in its first step, in order.

    Without the first two: in its second forward pass DDP agrees on new buckets, and waits for all ranks.
    """
    path = Path(folder) / f"{strategy}-{place}-{rank}.jsonl"
    slow = f"rank:1,at:{place},ms:{BRAKED_MS}"
    run = set_up(group, rank, path, strategy=strategy, slow=slow, bucket_mib="0.01", samples="72")
    events: list[str] = []
    pause = run.delay.pause
    run.delay.pause = lambda where: (events.append(where), pause(where))[1]
    run.strategy.model.register_forward_hook(lambda *_: events.append("forward"))
    for parameter in run.model.parameters():
        parameter.register_hook(lambda _: events.append("gradient"))
    train_epoch(Session(run))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == "step"][2:], events[: events.index("sync") + 1]


def paced_steps(group: Any, rank: int, folder: str, strategy: str) -> list[Any]:
    """The losses of three steps in which rank 1 stands in for a GPU."""
    path = Path(folder) / f"paced-{strategy}-{rank}.jsonl"
    run = set_up(group, rank, path, Pace(samples_per_s=1e4) if rank == 1 else None, strategy=strategy, steps="3")
    train_epoch(Session(run))
    return [line["loss"] for line in map(json.loads, path.read_text().splitlines()) if line["event"] == "step"]


def local_updates(group: Any, rank: int) -> tuple[list[int], int, float]:
    """Sizes of this rank's own updates in two global batches of which it takes 8, 2 or 2 samples; what it counts as
    trained on; and how far it is from plain SGD on the same samples in pieces of so many.
    """
    asked = {"shares": "node0=8,node1=2,node2=2", "fidelity": "local", "local_batch": "3", "augment": "none"}
    asked |= {"lr_schedule": "constant", "lr_warmup": "0"}
    run = set_up(group, rank, strategy="ddp", steps="2", **asked)
    alone = copy.deepcopy(run.model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=run.settings.lr, momentum=run.settings.momentum)
    sizes = [size for _ in range(2) for size in run.micro_batches.sizes(run.stream.shares, rank)]
    batches = [(images.clone(), labels) for images, labels in run.batches][:2]
    begun = torch.nn.utils.parameters_to_vector(alone.parameters())
    train_epoch(Session(run))
    images, labels = (torch.cat(parts).split(sizes) for parts in zip(*batches, strict=True))
    for part in zip(images, labels, strict=True):
        optimizer.zero_grad()
        (local_loss(alone, *part) / len(part[1])).backward()
        optimizer.step()
    came, expected = (torch.nn.utils.parameters_to_vector(model.parameters()) - begun for model in (run.model, alone))
    return sizes, run.strategy.samples, float((came - expected).norm() / expected.norm())


def refusal(group: Any, rank: int, pace: Pace | None = None, **more: str) -> str:
    try:
        set_up(group, rank, pace=pace, **more)
    except TrainError as error:
        return str(error)
    return "no failure"


def averaged_statistics(group: Any, rank: int) -> list[float]:
    """BatchNorm means that were 0, 10 and 20 after 1, 3 and 0 samples."""
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(10.0 * rank)
    average_running_statistics(norm, group, [1, 3, 0][rank])
    return norm.running_mean.tolist()


class FirstPixel(nn.Module):
    """Predicts class 1 where the first pixel is above 0, else class 0."""

    def forward(self, images: Any) -> Any:
        above = (images[:, 0, 0, 0] > 0).double()
        return nn.functional.pad(torch.stack([1 - above, above], dim=1), (0, 8))


def first_pixel_data() -> list[tuple[Any, int]]:
    """Seven samples: five of class 0, of which two are mistaken, and two of class 1, both right."""
    pixels, labels = [-1, 1, -1, 1, -1, 1, 1], [0, 0, 0, 0, 0, 1, 1]
    return [(torch.full((1, 2, 2), pixel), label) for pixel, label in zip(pixels, labels, strict=True)]


def failure_line(rank: int) -> str:
    try:
        with together(f"node{rank}"):
            if rank == 1:
                raise TrainError("the disk is full")
    except TrainError as error:
        return str(error)
    return "no failure"


def run_rank(rank: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=(Path(folder) / "port").read_text())
    torch.set_num_threads(1)
    info = RankInfo(rank, rank, WORLD_SIZE, WORLD_SIZE, "vm", f"node{rank}", None, "127.0.0.1")
    group = join(info, "auto", CPU)
    result: dict[str, Any] = {"times": {name: [compute_and_exposed_s(name, group) for _ in range(3)] for name in TIMED}}
    result["statistics"] = averaged_statistics(group, rank)
    own = first_pixel_data()[rank * 4 : rank * 4 + 4]  # 4, 3 and none
    network = FirstPixel()
    logits = ((network(images), labels) for images, labels in DataLoader(own, batch_size=2))
    evaluation = judged(network, logits, 10, CPU)
    result["evaluation"] = [evaluation.samples, evaluation.accuracy, evaluation.per_class[:3]]
    result["failure"] = failure_line(rank)
    result["braked"] = {
        f"{strategy} {place}": braked_steps(group, rank, folder, strategy, place)
        for strategy in BRAKED
        for place in PLACES
    }
    small = Pace(samples_per_s=1e6, memory_bytes=800_000)
    result["memory"] = refusal(group, rank, pace=small if rank == 1 else None)
    for_four = Pace(samples_per_s=1e6, memory_bytes=940_000)
    result["own share"] = refusal(group, rank, pace=for_four if rank == 1 else None, batch="13")
    result["no such rank"] = refusal(group, rank, slow="rank:3,at:start,ms:1")
    result["paced"] = {strategy: paced_steps(group, rank, folder, strategy) for strategy in PACED}
    result["local"] = local_updates(group, rank)
    paced = Pace(samples_per_s=1e4) if rank == 1 else None
    asked = {"strategy": "fsdp"}, {"sync_bn": "true"}, {"amp": "bf16"}
    result["not paced"] = [refusal(group, rank, paced, **settings) for settings in asked]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    leave()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "port").write_text(str(free_port()))
    mp.start_processes(run_rank, args=(str(folder),), nprocs=WORLD_SIZE, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize("strategy", TIMED)
def test_a_slow_ranks_compute_shows_as_waiting_on_the_others(results: list[dict[str, Any]], strategy: str) -> None:
    tries = zip(*(result["times"][strategy] for result in results), strict=True)
    (slow_compute_s, slow_exposed_s), *others = min(tries, key=lambda of_ranks: of_ranks[0][1])  # the calmest
    assert slow_compute_s >= SLOW_S
    assert slow_exposed_s < SLOW_S / 2
    for compute_s, exposed_s in others:
        assert compute_s < SLOW_S / 2
        assert compute_s + exposed_s >= SLOW_S * 0.9


def calmest(steps: Iterable[tuple[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    """Rank 1's line, then the others', of the step in which whatever else runs on this machine disturbed them least."""
    swapped = [(braked, first, last) for first, braked, last in steps]
    return min(swapped, key=lambda of: of[0]["exposed_ms"] + of[1]["compute_ms"] + of[2]["compute_ms"])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", BRAKED)
def test_a_brake_shows_as_compute_of_its_rank_and_as_waiting_of_the_others(
    results: list[dict[str, Any]], strategy: str, place: str
) -> None:
    of_ranks = [result["braked"][f"{strategy} {place}"][0] for result in results]
    assert [len(lines) for lines in of_ranks] == [4, 4, 4]
    braked, *others = calmest(zip(*of_ranks, strict=True))
    assert braked["compute_ms"] >= BRAKED_MS
    assert braked["exposed_ms"] < BRAKED_MS / 2
    for other in others:
        assert other["compute_ms"] < BRAKED_MS / 2
        assert other["exposed_ms"] > BRAKED_MS / 2
        assert other["comm_ms"] - braked["comm_ms"] > BRAKED_MS / 4
        assert strategy == "ddp" or other["comm_ms"] == pytest.approx(other["exposed_ms"], abs=0.002)


@pytest.mark.parametrize("strategy", BRAKED)
def test_the_brakes_places_are_before_forward_before_backward_and_after_the_last_gradient(
    results: list[dict[str, Any]], strategy: str
) -> None:
    expected = ["start", "forward", "backward", *["gradient"] * 10, "sync"]
    for result in results:
        for place in PLACES:
            events = result["braked"][f"{strategy} {place}"][1]
            assert [event for event in events if event != "call"] == expected
            assert ("call" in events) == (strategy == "ddp")  # the others exchange nothing before their last gradient
            assert strategy != "ddp" or events[-2] == "call"


def test_a_brake_for_a_rank_that_is_not_there_is_refused_by_every_rank(results: list[dict[str, Any]]) -> None:
    (message,) = {result["no such rank"] for result in results}
    assert message == "slow: rank:3,at:start,ms:1 names a rank that does not exist; the last rank is 2"


def test_a_paced_rank_without_the_memory_ends_the_others_too(results: list[dict[str, Any]]) -> None:
    (message,) = {result["memory"] for result in results}
    assert message.startswith("node1: out of memory: 4 samples take ")
    assert {result["own share"] for result in results} == {"no failure"}  # 5 are rank 0's, which is real


@pytest.mark.parametrize("strategy", PACED)
def test_a_paced_rank_keeps_up_with_ranks_that_compute(results: list[dict[str, Any]], strategy: str) -> None:
    assert [result["paced"][strategy] for result in results] == [[None] * 3] * WORLD_SIZE


def test_what_needs_a_paced_ranks_arithmetic_is_refused_by_every_rank(results: list[dict[str, Any]]) -> None:
    (messages,) = {tuple(result["not paced"]) for result in results}
    for setting, line in zip(("strategy=fsdp", "sync_bn=true", "amp=bf16"), messages, strict=True):
        assert line.startswith(f"node1: {setting} needs ranks that compute, but this rank is paced: ")


def test_batch_norms_statistics_are_averaged_by_samples(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["statistics"] == [7.5, 7.5]


def test_every_test_sample_counts_once_on_any_number_of_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        samples, accuracy, per_class = result["evaluation"]
        assert samples == 7
        assert accuracy == pytest.approx(5 / 7)
        assert per_class == [0.6, 1.0, None]


def test_one_ranks_failure_is_reported_by_every_rank_in_the_same_words(results: list[dict[str, Any]]) -> None:
    assert {result["failure"] for result in results} == {"node1: the disk is full"}


@pytest.mark.parametrize("is_called", [False, True])
def test_a_rank_without_samples_leaves_batch_norm_and_every_gradient_alone(is_called: bool) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3))
    model(torch.randn(4, 1, 2, 2))
    before = [buffer.clone() for buffer in model.buffers()]
    if is_called:
        with without_effect(model):
            weighted(
                local_loss(model, torch.full((2, 1, 2, 2), torch.inf), torch.zeros(2, dtype=torch.long)), 5
            ).backward()
    else:
        loss = no_loss(model)
        weighted(loss, 5).backward()
        assert loss.item() == 0
    assert all(torch.equal(parameter.grad, torch.zeros_like(parameter)) for parameter in model.parameters())
    assert all(torch.equal(buffer, old) for buffer, old in zip(model.buffers(), before, strict=True))
    assert model.training


def test_with_local_batch_a_rank_with_more_samples_makes_more_updates(results: list[Any]) -> None:
    sizes, counted, distances = zip(*(result["local"] for result in results), strict=True)
    assert sizes == ([3, 3, 2, 3, 3, 2], [2, 2], [2, 2])
    assert counted == (16, 4, 4)
    assert max(distances) < 1e-5
