"""Before the first update: `run = set_up(settings, rank_info, metrics)`.

Meets the other ranks, builds what they train together, opens the data, and writes the `start` record. Whatever is wrong
is said here, on every rank, before anything is computed.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer import nccl, ranks
from trainer.compute.arithmetic import arranged, choose_arithmetic, devices_of_all_ranks, use_arithmetic
from trainer.compute.graphs import Graphs, replayable, why_not
from trainer.compute.microbatches import MicroBatches
from trainer.compute.models import build_model, gradient_bytes, has_batch_norm, trainable
from trainer.compute.precision import Full, build_precision
from trainer.console import Console
from trainer.data.loading import Batches, agree_on_facts, choose_loader, open_batches
from trainer.env import RankInfo
from trainer.paced.anatomy import dissect
from trainer.paced.standin import (
    StandIn,
    StandInOptimizer,
    StandInWorker,
    Stopwatch,
    keep_freed_memory,
    memory_needed,
    most_samples,
)
from trainer.rebalance import Balance, Rebalancer
from trainer.shared.config import LOCAL_STEPS, AnySettings, Settings
from trainer.shared.errors import TrainError
from trainer.shared.experiments import DataSet
from trainer.shared.metrics import SCHEMA, MetricsWriter
from trainer.shared.pace import Pace
from trainer.strategies import Strategy, build_strategy
from trainer.strategies.ddp import Ddp
from trainer.stream import RankBatches, SampleStream
from trainer.timing import Brake, Timer, timer_for
from trainer.worker import WORKER


@dataclass(frozen=True)
class Run:
    """What stays the same from the first update to the last. learns: False where a rank is paced."""

    settings: Settings
    info: RankInfo
    metrics: MetricsWriter
    console: Console
    device: torch.device
    timer: Timer
    brake: Brake
    group: dist.ProcessGroup
    model: nn.Module
    strategy: Strategy
    precision: Full
    optimizer: torch.optim.Optimizer | StandInOptimizer
    graphs: Graphs | None
    facts: DataSet
    order: RankBatches
    micro_batches: MicroBatches
    rebalancer: Rebalancer | None
    batches: Batches
    test_batches: Callable[[], Batches] | None
    first_batches: Callable[[int], Batches]
    last_step: int
    learns: bool

    @property
    def stream(self) -> SampleStream:
        """As it is cut now."""
        return self.order.stream


def set_up(settings: Settings, info: RankInfo, metrics: MetricsWriter) -> Run:
    """Meets the other ranks, writes the `start` record, opens the data."""
    use_threads(info)
    asked = settings
    device = torch.device("cpu") if info.pace else ranks.choose_device(settings.device, settings.backend, info)
    if device.type == "cuda":
        metrics.peak_memory_bytes = lambda: torch.cuda.max_memory_allocated(device)
    timer = timer_for(device)
    torch.manual_seed(settings.seed)
    check_bottleneck(settings, info)

    group = ranks.join(info, settings.backend, device)
    settings = with_local_steps(settings)
    shares, speeds = ranks.shares_of_ranks(settings, info)
    facts = agree_on_facts(settings, info)
    stream = SampleStream(facts.train_samples, settings.batch, shares, settings.seed, needs_pairs(settings, facts))
    order = RankBatches(stream, info.rank)
    whole = settings.epochs * stream.steps
    last_step = min(whole, settings.steps or whole)
    # fsdp gathers weights in each micro-batch: no rank may take one more than another.
    caps = [speed.cap if speed else settings.local_batch or None for speed in speeds]
    micro_batches = MicroBatches(settings.accumulate, caps, together=settings.strategy == "fsdp")
    everyone = devices_of_all_ranks(device)
    with ranks.together(info.node):  # paced ranks are refused for reasons of their own: the others must not wait
        settings = choose_loader(settings, facts, info, device)
        settings = choose_arithmetic(settings, device, everyone)
        use_arithmetic(settings)
        model = network(settings, facts, info, metrics, stream, micro_batches).to(device)
        model = arranged(model, settings)
        precision = build_precision(settings.amp, device, None if settings.fidelity == "local" else group)
    learns = ranks.sum_over_ranks([float(info.pace is not None)])[0] == 0
    groups = batch_norm_groups(model, settings, micro_batches, shares, info.rank)
    keeps_time = {"postpone": model.stopwatch.postpone} if isinstance(model, StandIn) else {}
    brake = Brake(settings.bottleneck, info.rank, timer, **keeps_time)
    worker = StandInWorker(model.stopwatch) if isinstance(model, StandIn) else WORKER
    nodes, devices = ranks.gather_lines(info.node), ranks.gather_lines(device.type)
    strategy = build_strategy(
        settings, model, group, timer, brake, worker, nodes=nodes, devices=devices, updates=last_step
    )
    if isinstance(strategy, Ddp):
        settings = dataclasses.replace(settings, bucket_mib=strategy.bucket_mib)
    asked_graph, no_graph = settings.cuda_graph, why_not(device, settings, model)
    settings = dataclasses.replace(settings, cuda_graph="off" if no_graph or asked_graph == "off" else "on")
    start = start_fields(settings.as_used(last_step), info, device, group, model)
    metrics.write("start", **start, batch_per_rank=shares[info.rank], batch_norm_groups=groups, steps=last_step)
    opened = open_batches(settings, facts, order, info, device)
    console = Console(info, settings, last_step)
    if no_graph and asked_graph == "on":
        console.say(f"cuda_graph: off, {no_graph}")
    if settings.local_steps != asked.local_steps:
        console.say(f"local_steps=0: {settings.local_steps}, since only orch knows how fast hosts and links are")

    def gave_up(why: str) -> None:
        metrics.write("setting", name="cuda_graph", value="off", why=why)
        console.aside(f"cuda_graph: off from now on, {why}")

    rebalancer = None
    if settings.shares == "auto" and info.world_size > 1:
        balance = Balance(shares, speeds)
        is_profiled = speeds[info.rank] is not None
        room = (lambda: None) if is_profiled else room_of(model, info, micro_batches, order, device)
        rebalancer = Rebalancer(balance, order, micro_batches, metrics, settings.warmup_steps, room, console.say)
    return Run(
        settings=settings,
        info=info,
        metrics=metrics,
        console=console,
        device=device,
        timer=timer,
        brake=brake,
        group=group,
        model=model,
        strategy=strategy,
        precision=precision,
        optimizer=build_optimizer(settings, model),
        graphs=replayable(model, console.say, gave_up) if settings.cuda_graph == "on" else None,
        facts=facts,
        order=order,
        micro_batches=micro_batches,
        rebalancer=rebalancer,
        batches=opened.train,
        test_batches=opened.test,
        first_batches=opened.first,
        last_step=last_step,
        learns=learns,
    )


def network(
    settings: Settings,
    facts: DataSet,
    info: RankInfo,
    metrics: MetricsWriter,
    stream: SampleStream,
    micro_batches: MicroBatches,
) -> nn.Module:
    """With real weights, or a stand-in where the rank is paced. Raises TrainError where its BatchNorm can make nothing
    of how the batch is split.
    """
    if info.pace:
        share = max(micro_batches.sizes(stream.shares, info.rank))
        return stand_in(settings, facts, info, metrics, info.pace, share)
    model = build_model(settings.model, facts.shape, facts.classes)
    check_batch_norm(model, stream, settings.sync_bn)
    check_pairs(model, micro_batches, stream.shares)
    check_whole_batch(settings, micro_batches, stream.shares)
    return model


def with_local_steps(settings: Settings) -> Settings:
    """orch has put a number for 0 in its plan; whoever runs the trainer alone has none."""
    if settings.fidelity != "local" or settings.local_steps:
        return settings
    return dataclasses.replace(settings, local_steps=max(LOCAL_STEPS, settings.local_overlap + 1))


def needs_pairs(settings: Settings, facts: DataSet) -> bool:
    """Would a rank with a single sample be refused? Paced ranks, which have no network, must say the same."""
    with torch.device("meta"):
        return not settings.sync_bn and has_batch_norm(build_model(settings.model, facts.shape, facts.classes))


def stand_in(
    settings: Settings, facts: DataSet, info: RankInfo, metrics: MetricsWriter, pace: Pace, share: int
) -> StandIn:
    """Raises TrainError where the share would not fit into the memory of the GPU that is stood in for, and for what
    would need its arithmetic.
    """
    asked = {"strategy=fsdp": settings.strategy == "fsdp", "sync_bn=true": settings.sync_bn}
    asked[f"amp={settings.amp}"] = settings.amp != "none"
    for setting, is_set in asked.items():
        if is_set:
            raise TrainError(f"{setting} needs ranks that compute, this one is paced: leave it out, or leave paced out")
    anatomy = dissect(settings.model, facts.shape, facts.classes)
    needed = memory_needed(anatomy, pace, share)
    stopwatch = Stopwatch(pace, seed=(settings.seed, info.rank))
    keep_freed_memory()
    metrics.peak_memory_bytes = lambda: needed
    metrics.lateness = lambda: stopwatch.median_lateness(settings.warmup_steps)
    return StandIn(anatomy, stopwatch, facts.classes)


def room_of(
    model: nn.Module, info: RankInfo, micro_batches: MicroBatches, order: RankBatches, device: torch.device
) -> Callable[[], int | None]:
    """The most samples that this rank's memory holds at once: of a GPU, by what the largest micro-batch so far took."""
    if isinstance(model, StandIn) and info.pace:
        room = most_samples(model.anatomy, info.pace)
        return lambda: room
    if device.type != "cuda":
        return lambda: None

    largest = 0

    def estimate() -> int | None:
        """Between two updates, when all that is held is what stays: weights, gradients, momentum, images, ..."""
        nonlocal largest
        largest = max(largest, *micro_batches.sizes(order.stream.shares, info.rank))
        state_bytes = torch.cuda.memory_allocated(device)
        taken = torch.cuda.max_memory_allocated(device) - state_bytes
        free = 0.9 * torch.cuda.get_device_properties(device).total_memory - state_bytes
        return int(largest * free / taken) if largest and taken > 0 else None

    return estimate


def build_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer | StandInOptimizer:
    """settings: `fused_sgd` as it turned out."""
    if isinstance(model, StandIn):
        return StandInOptimizer(model)
    rule = {"lr": settings.lr, "momentum": settings.momentum, "weight_decay": settings.weight_decay}
    if settings.fused_sgd != "on":
        return torch.optim.SGD(model.parameters(), **rule)
    optimizer = torch.optim.SGD(model.parameters(), **rule, fused=True)
    if settings.momentum:
        # By itself it begins with memory as it finds it, which it would keep where fp16 leaves the first update out.
        optimizer.state.update({weight: {"momentum_buffer": torch.zeros_like(weight)} for weight in trainable(model)})
    return optimizer


def use_threads(info: RankInfo) -> None:
    """torch heeds OMP_NUM_THREADS by itself; without it, the ranks of a host share its cores evenly."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // info.local_world_size))


def check_bottleneck(settings: Settings, info: RankInfo) -> None:
    if settings.bottleneck and settings.bottleneck.rank >= info.world_size:
        raise TrainError(f"slow: {settings.slow} names a rank that is not there; the last one is {info.world_size - 1}")


def check_batch_norm(model: nn.Module, stream: SampleStream, whole_batch: bool = False) -> None:
    """A single sample has no variance: torch's BatchNorm refuses it where the picture has shrunk to one point.

    whole_batch: does it see the samples of all ranks (sync_bn)?
    """
    for step in {0, stream.steps - 1}:
        split = stream.shares_at(step) if stream.batch_at(step) < stream.batch else stream.shares
        groups = (stream.batch_at(step),) if whole_batch else split
        if has_batch_norm(model) and 1 in groups:
            raise TrainError(
                f"batch: of {stream.batch_at(step)} samples one rank gets a single one, and BatchNorm needs two; "
                f"choose another batch than {stream.batch}{'' if whole_batch else ', or sync_bn=true'}"
            )


def batch_norm_groups(
    model: nn.Module, settings: Settings, micro_batches: MicroBatches, shares: Sequence[int], rank: int
) -> list[tuple[int, int]] | None:
    """(samples, how many groups of so many) that this rank's BatchNorm sees in an update with a full batch; None
    without one, and for `dp`, which cuts the batch by itself.
    """
    if not has_batch_norm(model) or settings.strategy == "dp":
        return None
    sizes = [sum(shares)] if settings.sync_bn else micro_batches.sizes(shares, rank)
    return sorted(Counter(size for size in sizes if size).items(), reverse=True)


def check_pairs(model: nn.Module, micro_batches: MicroBatches, shares: Sequence[int]) -> None:
    """The same for what a rank takes at once."""
    sizes = {size for rank in range(len(shares)) for size in micro_batches.sizes(shares, rank)}
    if has_batch_norm(model) and 1 in sizes:
        raise TrainError("a micro-batch has a single sample, and BatchNorm needs two: local_batch=2, or more memory")


def check_whole_batch(settings: Settings, micro_batches: MicroBatches, shares: Sequence[int]) -> None:
    if settings.sync_bn and micro_batches.largest(shares) > 1:
        raise TrainError("sync_bn sees the whole batch at once, in micro-batches it cannot: leave out one of the two")


def start_fields(
    settings: AnySettings, info: RankInfo, device: torch.device, group: dist.ProcessGroup, model: nn.Module | None
) -> dict[str, Any]:
    """model: None where nothing is trained, and so nothing is paced."""
    on_gpu = device.type == "cuda"
    return {
        "schema": SCHEMA,
        "host": info.host,
        "node": info.node,
        "rank": info.rank,
        "local_rank": info.local_rank,
        "world_size": info.world_size,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "torch": torch.__version__,
        "nccl": nccl.version() if on_gpu else None,
        "backend": dist.get_backend(group),
        "model": settings.model if model else None,
        "parameters": sum(parameter.numel() for parameter in trainable(model)) if model else None,
        "gradient_bytes": gradient_bytes(model) if model else None,
        "paced": info.pace is not None and model is not None,
        "settings": dataclasses.asdict(settings),
    }


def cpu_name() -> str:
    """As the kernel calls it, e.g. `Intel(R) Xeon(R) Gold 6130`; `cpu` where it does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "cpu")
    except OSError:
        return "cpu"
