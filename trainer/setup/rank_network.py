"""Builds a rank's network, real or simulated, and checks that BatchNorm can use the split of the batch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from trainer.compute.microbatches import MicroBatches
from trainer.compute.models import moves_statistics, needs_pairs_of_samples
from trainer.data.sample_stream import SampleStream
from trainer.paced.standin import Anatomy, Learner, StandIn, dissect, memory_needed
from trainer.paced.stopwatch import Stopwatch
from trainer.ranks.rank_info import RankInfo
from trainer.setup.tensor_setup import keep_records, refuse_arithmetic
from trainer.setup.training_task import Experiment, TrainingTask
from trainer.shared.errors import TrainError
from trainer.shared.experiments import CHOSEN, DATA_SETS, DataSet
from trainer.shared.metrics import MetricsWriter
from trainer.shared.pace import Pace, no_pace_for
from trainer.shared.settings import Settings
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
    if not pace.like:
        return dissect(settings.model, facts.shape, facts.classes)
    like = CHOSEN[pace.like]
    return dissect(like["model"], DATA_SETS[like["data"]].shape, DATA_SETS[like["data"]].classes)


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
