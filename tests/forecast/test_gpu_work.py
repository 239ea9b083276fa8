"""The forecast charges the work on gradients that a strategy really does: counted over real Gloo, a rank by itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
import torch.distributed as dist

from orchestrator.forecast import (
    NCCL,
    LinkCosts,
    Site,
    Way,
    Workload,
    averaging,
    bucket_legs_s,
    buckets_of,
    exchange_s,
    layers_of,
)
from trainer.compute.compiler import Executor
from trainer.compute.models import build_model
from trainer.compute.timer import CpuTimer
from trainer.shared import AFTER_BACKWARD, Work, parse_settings
from trainer.strategies import build_strategy, local_loss

SHAPE = (1, 28, 28)
GB_PER_S = 288
LOCAL = {"fidelity": "local", "local_steps": "2"}
WAYS: dict[Way, dict[str, str]] = {
    **{Way(name): {"strategy": name} for name in AFTER_BACKWARD if name != "allreduce"},  # it copies nothing
    Way("allreduce_flat", "half"): {"strategy": "allreduce_flat", "fidelity": "half"},
    Way("ddp", "half"): {"strategy": "ddp", "fidelity": "half", "bucket_mib": "25"},
    Way("allreduce_flat", "compressed"): {"fidelity": "compressed", "compress_after": "0"},
    Way("parameter_average", "local", every=2): {**LOCAL, "local_overlap": "0"},
    Way("parameter_average", "local", every=2, overlap=1): {**LOCAL, "local_overlap": "1"},
    Way("parameter_average", "local", every=2, overlap=1, half_wire=True): {
        **LOCAL,
        "local_overlap": "1",
        "wire": "bf16",
    },
}


class Account(Executor):
    """Does the work, and keeps what it would take a GPU."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def __call__(self, work: Work, arithmetic: Callable[[], object]) -> None:
        self.works.append(work)
        arithmetic()


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.fidelity}-{way.strategy}-{way.overlap}-{way.half_wire}")
def test_the_forecast_charges_the_work_that_a_rank_does(way: Way, alone: Any) -> None:
    account = Account()
    model = build_model("lenet", SHAPE, 10)
    settings = parse_settings("mnist_lenet", WAYS[way])
    strategy = build_strategy(settings, model, alone, CpuTimer(), executor=account)
    exchanges = 2
    for _ in range(exchanges * way.every + way.overlap):
        model.zero_grad()
        images, labels = torch.zeros(2, *SHAPE), torch.zeros(2, dtype=torch.long)
        strategy.backward(local_loss(strategy.model, images, labels), 2, 2)
        strategy.after_update()
    did_s = sum(work.seconds(GB_PER_S) for work in account.works)
    assert did_s > 0
    assert did_s / exchanges == pytest.approx(charged_s(way), rel=1e-6)


def charged_s(way: Way) -> float:
    """Of an exchange, what is not the wire's."""
    costs = NCCL.on_gpus(GB_PER_S)
    free = dataclasses.replace(costs, moved_bytes_per_s=math.inf, kernel_s=0.0)
    with_work_s, without_s = (
        exchanged_s(way, LinkCosts([Site("a", 1, math.inf, math.inf)], each)) for each in (costs, free)
    )
    return with_work_s - without_s


def exchanged_s(way: Way, wire: LinkCosts) -> float:
    job = Workload(layers_of("lenet", SHAPE, 10), batch=2)
    if way.fidelity == "local":
        return exchange_s(job, wire, averaging(way))
    if way.strategy == "ddp":
        return sum(sum(bucket_legs_s(bucket, wire, way)) for bucket in buckets_of(job.layers, way.bucket_mib))
    return exchange_s(job, wire, way)


def test_a_gpus_work_takes_its_memory_and_the_starts_of_its_kernels() -> None:
    assert Work(900e9).seconds(1000) == pytest.approx(1.0)
    assert Work(0, kernels=100).seconds(1000) == pytest.approx(0.001)
    assert NCCL.on_gpus(1000).work_s(Work(900e9, kernels=100)) == pytest.approx(1.001)
