"""Builds a run before its first update: `join_group` joins the other ranks, `prepare` builds network and data.

Raises errors on every rank, before anything is computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.compute.arithmetic import (
    Full,
    arranged,
    build_precision,
    choose_arithmetic,
    devices_of_all_ranks,
    use_arithmetic,
)
from trainer.compute.compiler import ON_DEVICE, Executor
from trainer.compute.graphs import Graphs, replayable, why_not
from trainer.compute.microbatches import MicroBatches
from trainer.compute.models import gradient_bytes, needs_pairs_of_samples, trainable
from trainer.compute.timer import InjectedDelay, Timer, timer_for
from trainer.data.loading import Opened, agree_on_facts
from trainer.data.sample_stream import RankBatches, SampleStream
from trainer.paced.standin import (
    Learner,
    LearnerExecutor,
    LearningPart,
    PacedPart,
    StandIn,
    StandInExecutor,
    most_samples,
)
from trainer.pipeline.pipeline_strategy import Pipeline
from trainer.pipeline.stage import StageWork
from trainer.pipeline.stage_graphs import replay_stage
from trainer.ranks import process_group
from trainer.ranks.agreement import gather_lines, sum_over_ranks, together
from trainer.ranks.process_group import choose_device, join, use_threads
from trainer.ranks.rank_info import RankInfo
from trainer.rebalance.balance import Balance
from trainer.rebalance.rebalancer import Rebalancer
from trainer.setup.pipeline import (
    PipelinePlan,
    build_pipeline,
    learning_part,
    own_sizes,
    paced_clock,
    paced_part,
    plan_pipeline,
    real_part,
    shares_of_readers,
)
from trainer.setup.rank_network import (
    TensorPlan,
    batch_norm_groups,
    build_tensor,
    facts_of,
    needs_pairs,
    network,
    paced_slices,
    plan_tensor,
    shares_of_reader,
)
from trainer.setup.training_task import EXAMPLES, Experiment, TrainingTask
from trainer.setup.weights import first_weights
from trainer.shared.errors import TrainError
from trainer.shared.metrics import SCHEMA, MetricsWriter
from trainer.shared.settings import AnySettings, Settings
from trainer.shared.shares import Speed, at_most, parse_speeds, split_batch
from trainer.shared.stages import format_stages
from trainer.shared.strategy_table import LOCAL_STEPS
from trainer.strategies import Strategy, build_strategy
from trainer.strategies.base import Unused
from trainer.strategies.gradient_sum import DTYPES, GradientSum
from trainer.strategies.horovod import package
from trainer.strategies.single import Ddp
from trainer.tensor.tensor_strategy import READER
from trainer.training.ema import Ema
from trainer.training.loss_sum import Weights
from trainer.training.rates import Clipping, rates_of
from trainer.training.run import Console, Run


@dataclass(frozen=True)
class JoinedRank:
    """A rank that has joined the others. settings: as asked for."""

    settings: Settings
    info: RankInfo
    metrics: MetricsWriter
    device: torch.device
    group: dist.ProcessGroup


def set_up(settings: Settings, info: RankInfo, metrics: MetricsWriter) -> Run:
    """For a named experiment."""
    joined = join_group(settings, info, metrics)
    facts = agree_on_facts(settings, info)
    return prepare(joined, Experiment(settings, facts, first_weights(settings, facts, info)))


def join_group(settings: Settings, info: RankInfo, metrics: MetricsWriter) -> JoinedRank:
    """Chooses the device, seeds torch and joins the other ranks. Raises TrainError."""
    use_threads(info)
    device = torch.device("cpu") if info.pace else choose_device(settings.device, settings.backend, info)
    if device.type == "cuda":
        metrics.peak_memory_bytes = lambda: torch.cuda.max_memory_allocated(device)
    torch.manual_seed(settings.seed)
    check_bottleneck(settings, info)
    return JoinedRank(settings, info, metrics, device, join(info, settings.backend, device, settings.timeout_s))


def prepare(joined: JoinedRank, training_task: TrainingTask) -> Run:
    """Writes the `start` record, opens the data."""
    info, metrics, device, group = joined.info, joined.metrics, joined.device, joined.group
    settings = with_local_steps(joined.settings)
    batch_split = split_work(settings, info, training_task)
    if batch_split.pipeline:
        settings = dataclasses.replace(settings, stages=format_stages(batch_split.pipeline.layout.pipelines))
    settings, model, precision = build_trained(settings, joined, training_task, batch_split)
    learns, timer = do_all_learn(settings, info), timer_for(device)
    delay, strategy = build_synchronised(settings, info, model, group, timer, batch_split, precision)
    if isinstance(strategy, Ddp):
        settings = dataclasses.replace(settings, bucket_mib=strategy.bucket_mib)
    no_graph = why_not(device, settings, model)
    settings = dataclasses.replace(
        settings, cuda_graph="off" if no_graph or joined.settings.cuda_graph == "off" else "on"
    )
    write_start(joined, settings, batch_split, (training_task.name, model), counts=bool(strategy.counts))
    opened = training_task.open(settings, batch_split.order, info, device)
    console = Console(info, settings, batch_split.last_step, training_task.name)
    say_what_changed(console, joined.settings, settings, no_graph)
    optimizer = training_task.optimizer(settings, model)
    optimised = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    if settings.fidelity == "late" and is_adam(optimizer):
        console.say(LATE_ADAM)
    room = memory_limit_of(model, info, batch_split.micro_batches, batch_split.order, device)
    return Run(
        settings=settings,
        info=info,
        metrics=metrics,
        console=console,
        device=device,
        timer=timer,
        delay=delay,
        group=group,
        model=model,
        strategy=strategy,
        precision=precision,
        rebalancer=build_rebalancer(settings, info, metrics, console, batch_split, room),
        optimizer=optimizer,
        not_optimised=[weight for weight in model.parameters() if id(weight) not in optimised],
        clipping=build_clipping(settings, training_task, model, strategy, group),
        weights=Weights(settings, group, counts=bool(strategy.counts)),
        unused=Unused(model, group) if settings.sums_unused else None,
        ema=Ema(model, settings.ema) if settings.ema else None,
        rates=rates_of(settings, optimizer, batch_split.order.stream),
        graphs=build_graphs(model, strategy, metrics, console) if settings.cuda_graph == "on" else None,
        training_task=training_task,
        order=batch_split.order,
        micro_batches=batch_split.micro_batches,
        batches=opened.train,
        test_batches=opened.test,
        batches_of=opened.again,
        some_samples=functools.cache(lambda: some_samples(training_task, opened)),
        last_step=batch_split.last_step,
        learns=learns,
    )


def some_samples(training_task: TrainingTask, opened: Opened) -> Any:
    samples = min(EXAMPLES, training_task.train_samples)
    order = RankBatches(SampleStream(training_task.train_samples, samples, (samples,), seed=0), rank=0, steps=1)
    return next(iter(opened.again(order)))


def do_all_learn(settings: Settings, info: RankInfo) -> bool:
    """Raises TrainError if target_accuracy is set and a rank does not train."""
    learn = sum_over_ranks([float(not info.learns)])[0] == 0
    if settings.target_accuracy and not learn:
        raise TrainError("target_accuracy: a run with paced ranks trains no network and cannot reach it; leave it out")
    return learn


def write_start(
    joined: JoinedRank, settings: Settings, batch_split: BatchSplit, trained: tuple[str, nn.Module], *, counts: bool
) -> None:
    """The `start` record. counts: whether this rank's samples count; in a pipeline only one stage's count."""
    start = start_fields(settings.as_used(batch_split.last_step), joined.info, joined.device, joined.group, trained)
    sizes = batch_split.own_sizes(joined.info.rank)
    groups = batch_norm_groups(trained[1], settings, batch_split.shares, sizes if counts else ())
    split = {"batch_per_rank": sum(sizes), "batch_norm_groups": groups, "work": batch_split.own_work(joined.info.rank)}
    joined.metrics.write("start", **start, **split, steps=batch_split.last_step)


def build_trained(
    settings: Settings, joined: JoinedRank, training_task: TrainingTask, batch_split: BatchSplit
) -> tuple[Settings, nn.Module, Full]:
    """The settings for this host, the network on its device, and its precision. Raises TrainError."""
    info, device = joined.info, joined.device
    everyone = devices_of_all_ranks(device)
    with together(info.node):  # paced ranks have other errors, for which the others must not wait
        settings = training_task.with_loader(settings, info, device)
        settings = choose_arithmetic(settings, device, everyone)
        use_arithmetic(settings)
        if settings.strategy == "horovod" and not info.pace:
            package(device, between_hosts=info.local_world_size < info.world_size)
        model = build_network(settings, info, joined.metrics, training_task, batch_split).to(device)
        precision = build_precision(settings.amp, device, None if settings.fidelity == "local" else joined.group)
    return settings, arranged(model, settings), precision


def build_network(
    settings: Settings, info: RankInfo, metrics: MetricsWriter, training_task: TrainingTask, batch_split: BatchSplit
) -> nn.Module:
    """The whole network, or this rank's stage or slices."""
    stream, micro_batches = batch_split.order.stream, batch_split.micro_batches
    if batch_split.tensor and info.pace and info.pace.like:
        raise TrainError("paced: `like` works with whole networks and stages only; use another strategy than tensor")
    if batch_split.tensor and info.pace:
        sizes = batch_split.own_sizes(info.rank)
        return paced_slices(settings, batch_split.tensor, facts_of(training_task), info, info.pace, metrics, sizes)
    if not batch_split.pipeline:
        return network(settings, training_task, info, metrics, stream, micro_batches)
    plan, rank = batch_split.pipeline, info.rank
    if not info.pace:
        return real_part(training_task, plan, rank, micro_batches, stream)
    clock = paced_clock(settings, plan, info, info.pace, metrics, batch_split.own_sizes(rank))
    if not plan.learning:
        return paced_part(plan, training_task, rank, clock)
    return learning_part(plan, plan.learning, rank, real_part(training_task, plan, rank, micro_batches, stream), clock)


def build_synchronised(
    settings: Settings,
    info: RankInfo,
    model: nn.Module,
    group: dist.ProcessGroup,
    timer: Timer,
    batch_split: BatchSplit,
    precision: Full,
) -> tuple[InjectedDelay, Strategy | Pipeline]:
    """The strategy, and the delay for the setting `slow`."""
    if isinstance(model, StandIn | PacedPart):
        delay = InjectedDelay(settings.bottleneck, info.rank, timer, postpone=model.stopwatch.postpone)
        kind = LearnerExecutor if isinstance(model, Learner | LearningPart) else StandInExecutor
        executor: Executor = kind(model.stopwatch)
    else:
        delay, executor = InjectedDelay(settings.bottleneck, info.rank, timer), ON_DEVICE
    if batch_split.pipeline:
        updates = batch_split.last_step
        return delay, build_pipeline(
            settings, batch_split.pipeline, model, precision, group, timer, delay, executor, updates
        )
    nodes, devices = gather_lines(info.node), gather_lines(next(model.parameters()).device.type)
    if batch_split.tensor:
        sums = GradientSum(group, nodes, DTYPES[settings.sent_as], delay, executor, devices)
        return delay, build_tensor(batch_split.tensor, model, sums, timer, delay)
    strategy = build_strategy(
        settings, model, group, timer, delay, executor, nodes=nodes, devices=devices, updates=batch_split.last_step
    )
    return delay, strategy


def say_what_changed(console: Console, asked: Settings, settings: Settings, no_graph: str) -> None:
    if no_graph and asked.cuda_graph == "on":
        console.say(f"cuda_graph: off, {no_graph}")
    if settings.local_steps != asked.local_steps:
        console.say(f"local_steps=0: {settings.local_steps}, because only orch predicts the speed of hosts and links")


LATE_ADAM = (
    "warning: fidelity=late may cost accuracy with Adam or AdamW, which suffer from late gradients more than SGD does; "
    "compare with fidelity=exact, or use optimizer=sgd"
)


def is_adam(optimizer: Any) -> bool:
    """Also if it trains within a simulated network's time."""
    return isinstance(getattr(optimizer, "own", optimizer), torch.optim.Adam | torch.optim.AdamW)


def build_graphs(
    model: nn.Module, strategy: Strategy | Pipeline, metrics: MetricsWriter, console: Console
) -> Graphs | None:
    """None for a pipeline, whose stage has its own."""

    def gave_up(why: str) -> None:
        metrics.write("setting", name="cuda_graph", value="off", why=why)
        console.aside(f"cuda_graph: off from now on, {why}")

    if isinstance(strategy, Pipeline) and isinstance(strategy.stage, StageWork):
        replay_stage(strategy.stage, strategy.in_flight, console.say, gave_up)
        return None
    return replayable(model, console.say, gave_up)


def build_rebalancer(
    settings: Settings,
    info: RankInfo,
    metrics: MetricsWriter,
    console: Console,
    batch_split: BatchSplit,
    room: Callable[[], int | None],
) -> Rebalancer | None:
    """None unless `shares=auto` with several ranks. A profile already has the limit of memory."""
    if settings.shares != "auto" or info.world_size == 1:
        return None
    own_room = (lambda: None) if batch_split.speeds[info.rank] else room
    balance, micro_batches = Balance(batch_split.shares, batch_split.speeds), batch_split.micro_batches
    return Rebalancer(balance, batch_split.order, micro_batches, metrics, settings.warmup_steps, own_room, console.say)


def with_local_steps(settings: Settings) -> Settings:
    """Replaces 0, which orch replaces in its plans, for runs without orch."""
    if settings.fidelity != "local" or settings.local_steps:
        return settings
    return dataclasses.replace(settings, local_steps=max(LOCAL_STEPS, settings.local_overlap + 1))


def check_bottleneck(settings: Settings, info: RankInfo) -> None:
    if settings.bottleneck and settings.bottleneck.rank >= info.world_size:
        raise TrainError(
            f"slow: {settings.slow} names a rank that does not exist; the last rank is {info.world_size - 1}"
        )


@dataclass(frozen=True)
class BatchSplit:
    """The batch_split of data and batches over ranks."""

    order: RankBatches
    micro_batches: MicroBatches
    shares: tuple[int, ...]
    """By rank, of a full batch."""
    speeds: list[Speed | None]
    """By rank; None if unknown."""
    last_step: int
    """Updates of the whole run."""
    pipeline: PipelinePlan | None
    tensor: TensorPlan | None

    def own_work(self, rank: int) -> float | None:
        """This rank's part of a full batch's work; None if each rank has the whole network."""
        if self.tensor:
            return self.tensor.work(rank)
        if not self.pipeline:
            return None
        return self.pipeline.work(rank) * sum(self.own_sizes(rank)) / sum(self.shares)

    def own_sizes(self, rank: int) -> Sequence[int]:
        """This rank's micro-batches of a full batch."""
        if self.pipeline:
            return own_sizes(self.pipeline, self.micro_batches, self.shares, rank)
        return self.micro_batches.sizes(self.shares, READER if self.tensor else rank)


def split_work(settings: Settings, info: RankInfo, training_task: TrainingTask) -> BatchSplit:
    """A collective call. Raises TrainError if shares or network do not fit."""
    shares, speeds = shares_of_ranks(settings, info)
    pipeline = plan_pipeline(settings, training_task, info, speeds) if settings.strategy == "pipeline" else None
    tensor = plan_tensor(training_task, shares) if settings.strategy == "tensor" else None
    if pipeline:
        shares = shares_of_readers(pipeline, shares, settings.batch)
    if tensor:
        shares = shares_of_reader(shares)
    stream = SampleStream(
        training_task.train_samples, settings.batch, shares, settings.seed, needs_pairs(settings, training_task)
    )
    whole = settings.epochs * stream.steps
    # fsdp gathers weights in each micro-batch, so all ranks need equally many.
    caps = [speed.cap if speed else settings.local_batch or None for speed in speeds]
    if tensor:  # all hold the same samples
        caps = [min((cap for cap in caps if cap is not None), default=None)] * len(caps)
    least = 2 if needs_pairs_of_samples(training_task.skeleton()) else 1
    micro_batches = MicroBatches(settings.accumulate, caps, together=settings.strategy == "fsdp", least=least)
    if pipeline:
        usual = 1 if settings.fidelity == "late" else pipeline.micro_batches
        count, smaller_first = settings.accumulate or usual, settings.smaller_first
        micro_batches = MicroBatches(count, [None] * len(caps), False, smaller_first, least)
    last_step = min(whole, settings.steps or whole)
    order = RankBatches(stream, READER if tensor else info.rank)
    return BatchSplit(order, micro_batches, shares, speeds, last_step, pipeline, tensor)


def shares_of_ranks(settings: Settings, info: RankInfo) -> tuple[tuple[int, ...], list[Speed | None]]:
    """Samples of a full batch and speed of each rank. Raises TrainError if the setting does not fit the ranks."""
    names = [line.rpartition(":") for line in gather_lines(f"{info.node}:{info.local_rank}")]
    ranks = [(node, int(local_rank)) for node, _, local_rank in names]
    speeds = {rank: at_most(speed, settings.local_batch) for rank, speed in parse_speeds(settings.speeds).items()}
    try:
        shares = split_batch(settings.shares, speeds, ranks, settings.batch)
    except ValueError as error:
        raise TrainError(f"shares: {error}") from error
    return shares, [speeds.get(rank) for rank in ranks]


def build_clipping(
    settings: Settings,
    training_task: TrainingTask,
    model: nn.Module,
    strategy: Strategy | Pipeline,
    group: dist.ProcessGroup,
) -> Clipping | None:
    """None without a limit. group: of all ranks."""
    if not settings.clip_norm:
        return None
    if settings.fidelity == "local":
        return Clipping(model, settings.clip_norm, None, None)
    return Clipping(model, settings.clip_norm, _counted(settings, training_task, strategy, dist.get_rank()), group)


def _counted(
    settings: Settings, training_task: TrainingTask, strategy: Strategy | Pipeline, rank: int
) -> Collection[str] | None:
    """Names of weights whose squares count on this rank; None: all that it holds."""
    if settings.strategy == "fsdp":
        return None
    if strategy.parts is None:
        return None if rank == 0 else ()
    skeleton = training_task.skeleton()
    return strategy.parts.kept(rank, dict(skeleton.named_parameters()), skeleton).keys()


def memory_limit_of(
    model: nn.Module, info: RankInfo, micro_batches: MicroBatches, order: RankBatches, device: torch.device
) -> Callable[[], int | None]:
    """Returns the estimated number of samples that memory holds: on a GPU from the largest micro-batch so far."""
    if isinstance(model, StandIn) and info.pace:
        room = most_samples(model.anatomy, info.pace)
        return lambda: room
    if device.type != "cuda":
        return lambda: None

    largest = 0

    def estimate() -> int | None:
        # Called between updates, when only permanent memory is held: weights, gradients, momentum, images, ...
        nonlocal largest
        largest = max(largest, *micro_batches.sizes(order.stream.shares, order.rank))
        state_bytes = torch.cuda.memory_allocated(device)
        taken = torch.cuda.max_memory_allocated(device) - state_bytes
        free = 0.9 * torch.cuda.get_device_properties(device).total_memory - state_bytes
        return int(largest * free / taken) if largest and taken > 0 else None

    return estimate


def start_fields(
    settings: AnySettings,
    info: RankInfo,
    device: torch.device,
    group: dist.ProcessGroup,
    trained: tuple[str, nn.Module] | None,
) -> dict[str, Any]:
    """trained: the network and its name, or None."""
    name, model = trained or (None, None)
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
        "nccl": process_group.version() if on_gpu else None,
        "backend": dist.get_backend(group),
        "model": name,
        "parameters": sum(parameter.numel() for parameter in trainable(model)) if model else None,
        "gradient_bytes": gradient_bytes(model) if model else None,
        "paced": info.pace is not None and model is not None,
        "settings": dataclasses.asdict(settings),
        "samples_from": None,
    }


def cpu_name() -> str:
    """The kernel's name, like `Intel(R) Xeon(R) Gold 6130`, or `cpu`."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "cpu")
    except OSError:
        return "cpu"
