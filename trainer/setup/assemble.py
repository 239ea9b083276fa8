"""Before the first update: `met = meet(settings, rank_info, metrics)`, then `run = prepare(met, material)`.

Meets the other ranks, builds what they train together, opens the data, and writes the `start` record. Whatever is wrong
is said here, on every rank, before anything is computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.compute.arithmetic import arranged, choose_arithmetic, devices_of_all_ranks, use_arithmetic
from trainer.compute.brake import Brake
from trainer.compute.executor import ON_DEVICE, Executor
from trainer.compute.graphs import Graphs, replayable, why_not
from trainer.compute.precision import Full, build_precision
from trainer.compute.timer import Timer, timer_for
from trainer.data.loading import Opened, agree_on_facts
from trainer.data.sample_stream import RankBatches, SampleStream
from trainer.paced.executor import StandInExecutor
from trainer.paced.learner import Learner, LearnerExecutor
from trainer.paced.part import LearningPart, PacedPart
from trainer.paced.standin import StandIn
from trainer.pipeline.strategy import Pipeline
from trainer.ranks.agreement import gather_lines, sum_over_ranks, together
from trainer.ranks.devices import choose_device, use_threads
from trainer.ranks.process_group import join
from trainer.ranks.rank_info import RankInfo
from trainer.rebalance.balance import Balance
from trainer.rebalance.rebalancer import Rebalancer
from trainer.setup.batch_norm import batch_norm_groups
from trainer.setup.clipping import build_clipping
from trainer.setup.division import Division, divide
from trainer.setup.material import EXAMPLES, Experiment, Material
from trainer.setup.network import facts_of, network
from trainer.setup.pipeline import build_pipeline, learning_part, paced_clock, paced_part, real_part
from trainer.setup.room import room_of
from trainer.setup.start_record import start_fields
from trainer.setup.tensor import build_tensor, paced_slices
from trainer.setup.weights import first_weights
from trainer.shared.errors import TrainError
from trainer.shared.metrics import MetricsWriter
from trainer.shared.settings import Settings
from trainer.shared.stages import format_stages
from trainer.shared.strategy_table import LOCAL_STEPS
from trainer.strategies import Strategy, build_strategy
from trainer.strategies.ddp import Ddp
from trainer.strategies.gradient_sum import DTYPES, GradientSum
from trainer.strategies.horovod import package
from trainer.strategies.without_samples import Unused
from trainer.training.console import Console
from trainer.training.ema import Ema
from trainer.training.loss_sum import Weights
from trainer.training.rates import rates_of
from trainer.training.run import Run


@dataclass(frozen=True)
class Met:
    """A rank that has met the others. settings: as they were asked for."""

    settings: Settings
    info: RankInfo
    metrics: MetricsWriter
    device: torch.device
    group: dist.ProcessGroup


def set_up(settings: Settings, info: RankInfo, metrics: MetricsWriter) -> Run:
    """Of an experiment, by its name."""
    met = meet(settings, info, metrics)
    facts = agree_on_facts(settings, info)
    return prepare(met, Experiment(settings, facts, first_weights(settings, facts, info)))


def meet(settings: Settings, info: RankInfo, metrics: MetricsWriter) -> Met:
    """Chooses the rank's device, seeds torch's generators and joins the other ranks. Raises TrainError."""
    use_threads(info)
    device = torch.device("cpu") if info.pace else choose_device(settings.device, settings.backend, info)
    if device.type == "cuda":
        metrics.peak_memory_bytes = lambda: torch.cuda.max_memory_allocated(device)
    torch.manual_seed(settings.seed)
    check_bottleneck(settings, info)
    return Met(settings, info, metrics, device, join(info, settings.backend, device, settings.timeout_s))


def prepare(met: Met, material: Material) -> Run:
    """Writes the `start` record, opens the data."""
    info, metrics, device, group = met.info, met.metrics, met.device, met.group
    settings = with_local_steps(met.settings)
    division = divide(settings, info, material)
    if division.pipeline:
        settings = dataclasses.replace(settings, stages=format_stages(division.pipeline.layout.pipelines))
    settings, model, precision = build_trained(settings, met, material, division)
    learns, timer = do_all_learn(settings, info), timer_for(device)
    brake, strategy = build_synchronised(settings, info, model, group, timer, division, precision)
    if isinstance(strategy, Ddp):
        settings = dataclasses.replace(settings, bucket_mib=strategy.bucket_mib)
    no_graph = why_not(device, settings, model)
    settings = dataclasses.replace(settings, cuda_graph="off" if no_graph or met.settings.cuda_graph == "off" else "on")
    write_start(met, settings, division, (material.name, model), counts=bool(strategy.counts))
    opened = material.open(settings, division.order, info, device)
    console = Console(info, settings, division.last_step, material.name)
    say_what_changed(console, met.settings, settings, no_graph)
    optimizer = material.optimizer(settings, model)
    room = room_of(model, info, division.micro_batches, division.order, device)
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
        rebalancer=build_rebalancer(settings, info, metrics, console, division, room),
        optimizer=optimizer,
        clipping=build_clipping(settings, material, model, strategy, group),
        weights=Weights(settings, group, counts=bool(strategy.counts)),
        unused=Unused(model, group) if settings.sums_unused else None,
        ema=Ema(model, settings.ema) if settings.ema else None,
        rates=rates_of(settings, optimizer, division.order.stream),
        graphs=build_graphs(model, metrics, console) if settings.cuda_graph == "on" else None,
        material=material,
        order=division.order,
        micro_batches=division.micro_batches,
        batches=opened.train,
        test_batches=opened.test,
        batches_of=opened.again,
        some_samples=functools.cache(lambda: some_samples(material, opened)),
        last_step=division.last_step,
        learns=learns,
    )


def some_samples(material: Material, opened: Opened) -> Any:
    samples = min(EXAMPLES, material.train_samples)
    order = RankBatches(SampleStream(material.train_samples, samples, (samples,), seed=0), rank=0, steps=1)
    return next(iter(opened.again(order)))


def do_all_learn(settings: Settings, info: RankInfo) -> bool:
    """Raises TrainError for a target that ranks which do not could never reach."""
    learn = sum_over_ranks([float(not info.learns)])[0] == 0
    if settings.target_accuracy and not learn:
        raise TrainError("target_accuracy: a run with paced ranks learns nothing, and would not reach it; leave it out")
    return learn


def write_start(
    met: Met, settings: Settings, division: Division, trained: tuple[str, nn.Module], *, counts: bool
) -> None:
    """The `start` record. counts: whether this rank's samples are counted, which in a pipeline one stage's are."""
    start = start_fields(settings.as_used(division.last_step), met.info, met.device, met.group, trained)
    sizes = division.own_sizes(met.info.rank)
    groups = batch_norm_groups(trained[1], settings, division.shares, sizes if counts else ())
    split = {"batch_per_rank": sum(sizes), "batch_norm_groups": groups, "work": division.own_work(met.info.rank)}
    met.metrics.write("start", **start, **split, steps=division.last_step)


def build_trained(
    settings: Settings, met: Met, material: Material, division: Division
) -> tuple[Settings, nn.Module, Full]:
    """The settings as they turn out on this host, the network on its device, and its precision. Raises TrainError."""
    info, device = met.info, met.device
    everyone = devices_of_all_ranks(device)
    with together(info.node):  # paced ranks are refused for reasons of their own: the others must not wait
        settings = material.with_loader(settings, info, device)
        settings = choose_arithmetic(settings, device, everyone)
        use_arithmetic(settings)
        if settings.strategy == "horovod" and not info.pace:
            package(device, between_hosts=info.local_world_size < info.world_size)
        model = build_network(settings, info, met.metrics, material, division).to(device)
        precision = build_precision(settings.amp, device, None if settings.fidelity == "local" else met.group)
    return settings, arranged(model, settings), precision


def build_network(
    settings: Settings, info: RankInfo, metrics: MetricsWriter, material: Material, division: Division
) -> nn.Module:
    """All of it, or this rank's part in a pipeline, or of a paced rank its slices."""
    stream, micro_batches = division.order.stream, division.micro_batches
    if division.tensor and info.pace and info.pace.like:
        raise TrainError("paced: with `like` a network learns whole or in stages; use another strategy than tensor")
    if division.tensor and info.pace:
        sizes = division.own_sizes(info.rank)
        return paced_slices(settings, division.tensor, facts_of(material), info, info.pace, metrics, sizes)
    if not division.pipeline:
        return network(settings, material, info, metrics, stream, micro_batches)
    plan, rank = division.pipeline, info.rank
    if not info.pace:
        return real_part(material, plan, rank, micro_batches, stream)
    clock = paced_clock(settings, plan, info, info.pace, metrics, division.own_sizes(rank))
    if not plan.learning:
        return paced_part(plan, material, rank, clock)
    return learning_part(plan, plan.learning, rank, real_part(material, plan, rank, micro_batches, stream), clock)


def build_synchronised(
    settings: Settings,
    info: RankInfo,
    model: nn.Module,
    group: dist.ProcessGroup,
    timer: Timer,
    division: Division,
    precision: Full,
) -> tuple[Brake, Strategy | Pipeline]:
    """The strategy that keeps the ranks together, and the brake that the setting `slow` puts on it."""
    if isinstance(model, StandIn | PacedPart):
        brake = Brake(settings.bottleneck, info.rank, timer, postpone=model.stopwatch.postpone)
        kind = LearnerExecutor if isinstance(model, Learner | LearningPart) else StandInExecutor
        executor: Executor = kind(model.stopwatch)
    else:
        brake, executor = Brake(settings.bottleneck, info.rank, timer), ON_DEVICE
    if division.pipeline:
        return brake, build_pipeline(settings, division.pipeline, model, precision, group, timer, brake, executor)
    nodes, devices = gather_lines(info.node), gather_lines(next(model.parameters()).device.type)
    if division.tensor:
        sums = GradientSum(group, nodes, DTYPES[settings.sent_as], brake, executor, devices)
        return brake, build_tensor(division.tensor, model, sums, timer, brake)
    strategy = build_strategy(
        settings, model, group, timer, brake, executor, nodes=nodes, devices=devices, updates=division.last_step
    )
    return brake, strategy


def say_what_changed(console: Console, asked: Settings, settings: Settings, no_graph: str) -> None:
    if no_graph and asked.cuda_graph == "on":
        console.say(f"cuda_graph: off, {no_graph}")
    if settings.local_steps != asked.local_steps:
        console.say(f"local_steps=0: {settings.local_steps}, since only orch knows how fast hosts and links are")


def build_graphs(model: nn.Module, metrics: MetricsWriter, console: Console) -> Graphs:
    def gave_up(why: str) -> None:
        metrics.write("setting", name="cuda_graph", value="off", why=why)
        console.aside(f"cuda_graph: off from now on, {why}")

    return replayable(model, console.say, gave_up)


def build_rebalancer(
    settings: Settings,
    info: RankInfo,
    metrics: MetricsWriter,
    console: Console,
    division: Division,
    room: Callable[[], int | None],
) -> Rebalancer | None:
    """None unless `shares=auto` has several ranks. A profile has already said how much memory holds."""
    if settings.shares != "auto" or info.world_size == 1:
        return None
    own_room = (lambda: None) if division.speeds[info.rank] else room
    balance, micro_batches = Balance(division.shares, division.speeds), division.micro_batches
    return Rebalancer(balance, division.order, micro_batches, metrics, settings.warmup_steps, own_room, console.say)


def with_local_steps(settings: Settings) -> Settings:
    """orch has put a number for 0 in its plan; whoever runs the trainer alone has none."""
    if settings.fidelity != "local" or settings.local_steps:
        return settings
    return dataclasses.replace(settings, local_steps=max(LOCAL_STEPS, settings.local_overlap + 1))


def check_bottleneck(settings: Settings, info: RankInfo) -> None:
    if settings.bottleneck and settings.bottleneck.rank >= info.world_size:
        raise TrainError(f"slow: {settings.slow} names a rank that is not there; the last one is {info.world_size - 1}")
