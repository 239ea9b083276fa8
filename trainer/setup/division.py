"""How an update is divided over the ranks: the sample stream, each rank's share, and its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.compute.microbatches import MicroBatches
from trainer.data.sample_stream import RankBatches, SampleStream
from trainer.ranks.rank_info import RankInfo
from trainer.setup.material import Material
from trainer.setup.network import needs_pairs
from trainer.setup.pipeline import PipelinePlan, own_sizes, plan_pipeline, shares_of_readers
from trainer.setup.shares import shares_of_ranks
from trainer.setup.tensor import TensorPlan, plan_tensor, shares_of_reader
from trainer.shared.settings import Settings
from trainer.shared.shares import Speed
from trainer.tensor.strategy import READER


@dataclass(frozen=True)
class Division:
    """How the data and the batches are divided."""

    order: RankBatches
    micro_batches: MicroBatches
    shares: tuple[int, ...]
    """Samples of a full batch for each rank."""
    speeds: list[Speed | None]
    """Each rank's speed; None where nothing is known."""
    last_step: int
    """Updates of the whole run."""
    pipeline: PipelinePlan | None
    tensor: TensorPlan | None

    def own_work(self, rank: int) -> float | None:
        """This rank's part of what a full batch takes; None where each rank has the whole network."""
        if self.tensor:
            return self.tensor.work(rank)
        if not self.pipeline:
            return None
        return self.pipeline.work(rank) * sum(self.own_sizes(rank)) / sum(self.shares)

    def own_sizes(self, rank: int) -> Sequence[int]:
        """Micro-batches of a full batch that this rank computes."""
        if self.pipeline:
            return own_sizes(self.pipeline, self.micro_batches, self.shares, rank)
        return self.micro_batches.sizes(self.shares, READER if self.tensor else rank)


def divide(settings: Settings, info: RankInfo, material: Material) -> Division:
    """Waits for all ranks. Raises TrainError where shares do not fit the ranks, or the network its strategy."""
    shares, speeds = shares_of_ranks(settings, info)
    pipeline = plan_pipeline(settings, material, info, speeds) if settings.strategy == "pipeline" else None
    tensor = plan_tensor(material, shares) if settings.strategy == "tensor" else None
    if pipeline:
        shares = shares_of_readers(pipeline, shares, settings.batch)
    if tensor:
        shares = shares_of_reader(shares)
    stream = SampleStream(
        material.train_samples, settings.batch, shares, settings.seed, needs_pairs(settings, material)
    )
    whole = settings.epochs * stream.steps
    # fsdp gathers weights in each micro-batch: no rank may take one more than another.
    caps = [speed.cap if speed else settings.local_batch or None for speed in speeds]
    if tensor:  # all hold the same samples at once
        caps = [min((cap for cap in caps if cap is not None), default=None)] * len(caps)
    micro_batches = MicroBatches(settings.accumulate, caps, together=settings.strategy == "fsdp")
    if pipeline:
        micro_batches = MicroBatches(settings.accumulate or pipeline.micro_batches, [None] * len(caps), together=False)
    last_step = min(whole, settings.steps or whole)
    order = RankBatches(stream, READER if tensor else info.rank)
    return Division(order, micro_batches, shares, speeds, last_step, pipeline, tensor)
