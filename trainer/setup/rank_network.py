"""The network that a rank trains: the real one, or a stand-in where the rank is paced."""

from __future__ import annotations

from torch import nn

from trainer.compute.microbatches import MicroBatches
from trainer.compute.models import needs_pairs_of_samples
from trainer.data.sample_stream import SampleStream
from trainer.paced.standin import Anatomy, Learner, StandIn, dissect, memory_needed
from trainer.paced.stopwatch import Stopwatch
from trainer.ranks.rank_info import RankInfo
from trainer.setup.batch_norm_limits import check_batch_norm, check_estimated, check_pairs, check_whole_batch
from trainer.setup.material import Experiment, Material
from trainer.setup.tensor_setup import keep_records, refuse_arithmetic
from trainer.shared.experiments import CHOSEN, DATA_SETS, DataSet
from trainer.shared.metrics import MetricsWriter
from trainer.shared.pace import Pace, no_pace_for
from trainer.shared.settings import Settings


def network(
    settings: Settings,
    material: Material,
    info: RankInfo,
    metrics: MetricsWriter,
    stream: SampleStream,
    micro_batches: MicroBatches,
) -> nn.Module:
    """With real weights, or a stand-in where the rank is paced. Raises TrainError where its BatchNorm can make nothing
    of how the batch is split.
    """
    share = max(micro_batches.sizes(stream.shares, info.rank))
    if info.pace and not info.learns:
        return stand_in(settings, facts_of(material), info, metrics, info.pace, share)
    model = material.network()
    if info.pace:
        model = stand_in(settings, facts_of(material), info, metrics, info.pace, share, model)
    check_estimated(settings, material, model)
    check_batch_norm(model, stream, settings.sync_bn)
    check_pairs(model, micro_batches, stream.shares)
    check_whole_batch(settings, micro_batches, stream.shares)
    return model


def needs_pairs(settings: Settings, material: Material) -> bool:
    """Would a rank with a single sample be refused? Paced ranks, which have no network, must say the same."""
    return not settings.sync_bn and needs_pairs_of_samples(material.skeleton())


def facts_of(material: Material) -> DataSet:
    """Of an experiment, whose speed a paced rank knows. Raises TrainError for a script's own network."""
    if isinstance(material, Experiment):
        return material.facts
    raise no_pace_for(material.name)


def stand_in(
    settings: Settings,
    facts: DataSet,
    info: RankInfo,
    metrics: MetricsWriter,
    pace: Pace,
    share: int,
    learning: nn.Module | None = None,
) -> StandIn:
    """learning: the network that learns, where the pace is that of a larger one.

    Raises TrainError where the share would not fit into the memory of the GPU that is stood in for, and for what would
    need its arithmetic.
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
    """Of the network that the rank stands in for."""
    if not pace.like:
        return dissect(settings.model, facts.shape, facts.classes)
    like = CHOSEN[pace.like]
    return dissect(like["model"], DATA_SETS[like["data"]].shape, DATA_SETS[like["data"]].classes)
