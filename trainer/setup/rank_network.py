"""Builds a rank's network, real, simulated or sliced, and checks that BatchNorm can use the split of the batch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from trainer.compute.buffers import bytes_of
from trainer.compute.microbatches import MicroBatches
from trainer.compute.models import moves_statistics, needs_pairs_of_samples
from trainer.compute.timer import InjectedDelay, Timer
from trainer.data.sample_stream import SampleStream
from trainer.paced.standin import Anatomy, Learner, StandIn, check_memory, dissect, keep_freed_memory, memory_needed
from trainer.paced.stopwatch import StageClock, Stopwatch
from trainer.ranks.rank_info import RankInfo
from trainer.setup.training_task import Experiment, TrainingTask
from trainer.shared.errors import TrainError
from trainer.shared.experiments import CHOSEN, DATA_SETS, DataSet
from trainer.shared.metrics import MetricsWriter
from trainer.shared.pace import Pace, no_pace_for
from trainer.shared.setting_fields import declared, is_changed
from trainer.shared.settings import Settings
from trainer.shared.strategy_table import STRATEGIES
from trainer.strategies.gradient_sum import GradientSum
from trainer.tensor.sliced_layers import Layer, Meeting, cut, layers_of
from trainer.tensor.tensor_strategy import READER, PacedSlices, SlicedParts, TensorParallel
from trainer.training.rates import random_state, set_random_state


def network(
    settings: Settings,
    training_task: TrainingTask,
    info: RankInfo,
    metrics: MetricsWriter,
    stream: SampleStream,
    micro_batches: MicroBatches,
) -> nn.Module:
    """Simulated if the rank is paced. Raises TrainError if BatchNorm cannot use the split of the batch."""
    share = max(micro_batches.sizes(stream.shares, info.rank))
    if info.pace and not info.learns:
        return stand_in(settings, facts_of(training_task), info, metrics, info.pace, share)
    model = training_task.network()
    if info.pace:
        model = stand_in(settings, facts_of(training_task), info, metrics, info.pace, share, model)
    check_estimated(settings, training_task, model)
    check_batch_norm(model, stream, settings.sync_bn)
    check_pairs(model, micro_batches, stream.shares)
    check_whole_batch(settings, micro_batches, stream.shares)
    return model


def needs_pairs(settings: Settings, training_task: TrainingTask) -> bool:
    """Whether a rank with a single sample is refused. Paced ranks must answer alike."""
    return not settings.sync_bn and needs_pairs_of_samples(training_task.skeleton())


def facts_of(training_task: TrainingTask) -> DataSet:
    """An experiment's facts. Raises TrainError for a script's own network, whose speed is unknown."""
    if isinstance(training_task, Experiment):
        return training_task.facts
    raise no_pace_for(training_task.name)


def stand_in(
    settings: Settings,
    facts: DataSet,
    info: RankInfo,
    metrics: MetricsWriter,
    pace: Pace,
    share: int,
    learning: nn.Module | None = None,
) -> StandIn:
    """learning: a smaller network that learns within the simulated network's time.

    Raises TrainError if the share exceeds the simulated GPU's memory, or a setting needs real arithmetic.
    """
    refuse_arithmetic(settings)
    anatomy = anatomy_of(settings, facts, pace)
    needed = memory_needed(anatomy, pace, share)
    stopwatch = Stopwatch(pace, seed=(settings.seed, info.rank))
    keep_records(metrics, settings, stopwatch, needed)
    if learning:
        return Learner(anatomy, stopwatch, learning, facts.classes)
    return StandIn(anatomy, stopwatch, facts.classes)


def anatomy_of(settings: Settings, facts: DataSet, pace: Pace) -> Anatomy:
    model = settings.model
    if pace.like:
        model, facts = CHOSEN[pace.like]["model"], DATA_SETS[CHOSEN[pace.like]["data"]]
    return replace(dissect(model, facts.shape, facts.classes), states=settings.states)


def check_batch_norm(model: nn.Module, stream: SampleStream, whole_batch: bool = False, may_sync: bool = True) -> None:
    """Raises TrainError if a rank gets a single sample. whole_batch: sync_bn is on. may_sync: it is possible."""
    # torch's BatchNorm refuses a single value per channel, which has no variance.
    or_sync = ", or sync_bn=true" if may_sync and not whole_batch else ""
    for step in {0, stream.steps - 1}:
        split = stream.shares_at(step) if stream.batch_at(step) < stream.batch else stream.shares
        groups = (stream.batch_at(step),) if whole_batch else split
        if needs_pairs_of_samples(model) and 1 in groups:
            raise TrainError(
                f"batch: of {stream.batch_at(step)} samples a rank gets only one, but BatchNorm needs two; "
                f"choose another batch than {stream.batch}{or_sync}"
            )


def batch_norm_groups(
    model: nn.Module, settings: Settings, shares: Sequence[int], own: Sequence[int]
) -> list[tuple[int, int]] | None:
    """(samples, count) of BatchNorm's groups on this rank in a full batch; None without BatchNorm in training mode, and
    for `dp`, which cuts the batch itself.
    """
    if not needs_pairs_of_samples(model) or settings.strategy == "dp":
        return None
    sizes = [sum(shares)] if settings.sync_bn else own
    return sorted(Counter(size for size in sizes if size).items(), reverse=True)


def check_pairs(model: nn.Module, micro_batches: MicroBatches, shares: Sequence[int]) -> None:
    """Raises TrainError if a micro-batch has a single sample."""
    sizes = {size for rank in range(len(shares)) for size in micro_batches.sizes(shares, rank)}
    if needs_pairs_of_samples(model) and 1 in sizes:
        raise TrainError(
            "a micro-batch has a single sample, but BatchNorm needs two: use local_batch=2, or more memory"
        )


def check_estimated(settings: Settings, training_task: TrainingTask, model: nn.Module) -> None:
    """Raises TrainError if statistics must be estimated, which calls the network with a batch's first tensor, and that
    fails.
    """
    name = "ema" if settings.ema else "fidelity=local" if settings.fidelity == "local" else ""
    if not settings.is_own or not name or not moves_statistics(model):
        return
    random = random_state()
    try:
        example = torch.zeros_like(training_task.example(), device="cpu")
        with torch.no_grad():
            copy.deepcopy(model)(example)
    except Exception as error:  # the network's own errors
        raise TrainError(
            f"{name}: BatchNorm's statistics are estimated by calling the network with the first tensor of each "
            f"batch, and {type(model).__name__} fails with it: let `collate` give inputs and labels, or leave out "
            f"{name}"
        ) from error
    finally:
        set_random_state(random)


def check_whole_batch(settings: Settings, micro_batches: MicroBatches, shares: Sequence[int]) -> None:
    if settings.sync_bn and micro_batches.largest(shares) > 1:
        raise TrainError(
            "sync_bn needs the whole batch at once, but it is cut into micro-batches: leave out one of the two"
        )


# Sets up tensor parallelism, and the common parts of paced ranks.


@dataclass(frozen=True)
class TensorPlan:
    """Equal on all ranks. layers: in the order of forward."""

    layers: tuple[Layer, ...]

    def work(self, rank: int) -> float:
        """The rank's part of the network's multiplications, 0..1."""
        return sum(layer.work * layer.slices.own(rank)[1] / sum(layer.slices.channels) for layer in self.layers)


def plan_tensor(training_task: TrainingTask, shares: Sequence[int]) -> TensorPlan:
    """shares: each rank's part of the work, in the form of a batch split."""
    return TensorPlan(layers_of(training_task.skeleton(), training_task.example(), shares))


def shares_of_reader(shares: Sequence[int]) -> tuple[int, ...]:
    """The whole batch for one rank, whose samples all others read, too."""
    return tuple(sum(shares) if rank == READER else 0 for rank in range(len(shares)))


def build_tensor(
    plan: TensorPlan, model: nn.Module, sums: GradientSum, timer: Timer, delay: InjectedDelay
) -> TensorParallel:
    """Cuts the model in place. sums: over all ranks."""
    meeting = Meeting(sums, timer)
    if isinstance(model, PacedSlices):
        model.meeting = meeting
    else:
        cut(model, plan.layers, meeting)
    return TensorParallel(model, plan.layers, meeting, timer, delay)


def paced_slices(
    settings: Settings,
    plan: TensorPlan,
    facts: DataSet,
    info: RankInfo,
    pace: Pace,
    metrics: MetricsWriter,
    sizes: Sequence[int],
) -> PacedSlices:
    """sizes: micro-batches of the whole batch. Raises TrainError if the simulated GPU lacks memory, or a setting needs
    real arithmetic.
    """
    refuse_arithmetic(settings)
    anatomy = dissect(settings.model, facts.shape, facts.classes)
    whole = {name: weight.detach() for name, weight in anatomy.model.named_parameters()}
    weights = list(SlicedParts(plan.layers).held(info.rank, whole, anatomy.model).values())
    needed = (
        settings.states * bytes_of(*weights)
        + bytes_of(*anatomy.model.buffers())
        + max(sizes) * anatomy.activation_bytes
    )
    check_memory(
        pace,
        needed,
        f"its slices and the activations of {max(sizes)} samples",
        "use a smaller batch, or accumulate=N; strategy=pipeline splits activations, too",
    )
    clock = StageClock(pace, plan.work(info.rank), 1, seed=(settings.seed, info.rank))
    keep_records(metrics, settings, clock, needed)
    return PacedSlices(weights, clock, plan.layers, info.rank, facts.classes)


def refuse_arithmetic(settings: Settings) -> None:
    """Raises TrainError for settings that need real arithmetic."""
    asked = [] if STRATEGIES[settings.strategy].on_paced else ["strategy"]
    asked += [f.name for f in fields(settings) if not declared(f).on_paced and is_changed(settings, f)]
    if asked:
        value = getattr(settings, asked[0])
        raise TrainError(
            f"{asked[0]}={'true' if value is True else value} needs ranks that compute, but this rank is paced: leave "
            "it out, or leave paced out"
        )


def keep_records(
    metrics: MetricsWriter, settings: Settings, stopwatch: Stopwatch | StageClock, needed_bytes: int
) -> None:
    """Records the simulated GPU's memory and this rank's lateness."""
    keep_freed_memory()
    metrics.peak_memory_bytes = lambda: needed_bytes
    metrics.lateness = lambda: stopwatch.median_lateness(settings.warmup_steps)
