"""Before the first update: `run = set_up(settings, rank_info, metrics)`.

Meets the other ranks, builds what they train together, opens the data, and writes the `start` record. Whatever is wrong
is said here, on every rank, before anything is computed.
"""

from __future__ import annotations

import dataclasses

import torch

from trainer.compute.arithmetic import arranged, choose_arithmetic, devices_of_all_ranks, use_arithmetic
from trainer.compute.brake import Brake
from trainer.compute.executor import ON_DEVICE
from trainer.compute.graphs import replayable, why_not
from trainer.compute.microbatches import MicroBatches
from trainer.compute.precision import build_precision
from trainer.compute.timer import timer_for
from trainer.data.loading import agree_on_facts, choose_loader, open_batches
from trainer.data.sample_stream import RankBatches, SampleStream
from trainer.paced.executor import StandInExecutor
from trainer.paced.standin import StandIn
from trainer.ranks.agreement import gather_lines, sum_over_ranks, together
from trainer.ranks.devices import choose_device, use_threads
from trainer.ranks.process_group import join
from trainer.ranks.rank_info import RankInfo
from trainer.rebalance.balance import Balance
from trainer.rebalance.rebalancer import Rebalancer
from trainer.setup.batch_norm import batch_norm_groups
from trainer.setup.network import needs_pairs, network
from trainer.setup.optimizer import build_optimizer
from trainer.setup.room import room_of
from trainer.setup.shares import shares_of_ranks
from trainer.setup.start_record import start_fields
from trainer.shared.config import LOCAL_STEPS, Settings
from trainer.shared.errors import TrainError
from trainer.shared.metrics import MetricsWriter
from trainer.strategies import build_strategy
from trainer.strategies.ddp import Ddp
from trainer.training.console import Console
from trainer.training.run import Run


def set_up(settings: Settings, info: RankInfo, metrics: MetricsWriter) -> Run:
    """Meets the other ranks, writes the `start` record, opens the data."""
    use_threads(info)
    asked = settings
    device = torch.device("cpu") if info.pace else choose_device(settings.device, settings.backend, info)
    if device.type == "cuda":
        metrics.peak_memory_bytes = lambda: torch.cuda.max_memory_allocated(device)
    timer = timer_for(device)
    torch.manual_seed(settings.seed)
    check_bottleneck(settings, info)

    group = join(info, settings.backend, device)
    settings = with_local_steps(settings)
    shares, speeds = shares_of_ranks(settings, info)
    facts = agree_on_facts(settings, info)
    stream = SampleStream(facts.train_samples, settings.batch, shares, settings.seed, needs_pairs(settings, facts))
    order = RankBatches(stream, info.rank)
    whole = settings.epochs * stream.steps
    last_step = min(whole, settings.steps or whole)
    # fsdp gathers weights in each micro-batch: no rank may take one more than another.
    caps = [speed.cap if speed else settings.local_batch or None for speed in speeds]
    micro_batches = MicroBatches(settings.accumulate, caps, together=settings.strategy == "fsdp")
    everyone = devices_of_all_ranks(device)
    with together(info.node):  # paced ranks are refused for reasons of their own: the others must not wait
        settings = choose_loader(settings, facts, info, device)
        settings = choose_arithmetic(settings, device, everyone)
        use_arithmetic(settings)
        model = network(settings, facts, info, metrics, stream, micro_batches).to(device)
        model = arranged(model, settings)
        precision = build_precision(settings.amp, device, None if settings.fidelity == "local" else group)
    learns = sum_over_ranks([float(info.pace is not None)])[0] == 0
    groups = batch_norm_groups(model, settings, micro_batches, shares, info.rank)
    keeps_time = {"postpone": model.stopwatch.postpone} if isinstance(model, StandIn) else {}
    brake = Brake(settings.bottleneck, info.rank, timer, **keeps_time)
    executor = StandInExecutor(model.stopwatch) if isinstance(model, StandIn) else ON_DEVICE
    nodes, devices = gather_lines(info.node), gather_lines(device.type)
    strategy = build_strategy(
        settings, model, group, timer, brake, executor, nodes=nodes, devices=devices, updates=last_step
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


def with_local_steps(settings: Settings) -> Settings:
    """orch has put a number for 0 in its plan; whoever runs the trainer alone has none."""
    if settings.fidelity != "local" or settings.local_steps:
        return settings
    return dataclasses.replace(settings, local_steps=max(LOCAL_STEPS, settings.local_overlap + 1))


def check_bottleneck(settings: Settings, info: RankInfo) -> None:
    if settings.bottleneck and settings.bottleneck.rank >= info.world_size:
        raise TrainError(f"slow: {settings.slow} names a rank that is not there; the last one is {info.world_size - 1}")
