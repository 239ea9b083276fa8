"""Who computes which channels under strategy=tensor, and what all ranks read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from trainer.compute.brake import Brake
from trainer.compute.flat_buffer import bytes_of
from trainer.compute.timer import Timer
from trainer.paced.anatomy import dissect
from trainer.paced.memory import out_of_memory
from trainer.paced.stage_clock import StageClock
from trainer.ranks.rank_info import RankInfo
from trainer.setup.material import Material
from trainer.setup.paced import keep_records, refuse_arithmetic
from trainer.shared.experiments import DataSet
from trainer.shared.metrics import MetricsWriter
from trainer.shared.pace import Pace
from trainer.shared.settings import Settings
from trainer.strategies.gradient_sum import GradientSum
from trainer.tensor.cut import cut
from trainer.tensor.meeting import Meeting
from trainer.tensor.paced import PacedSlices
from trainer.tensor.strategy import READER, SlicedParts, TensorParallel
from trainer.tensor.survey import Layer, layers_of


@dataclass(frozen=True)
class TensorPlan:
    """The same on all ranks. layers: in the order in which forward comes to them."""

    layers: tuple[Layer, ...]

    def work(self, rank: int) -> float:
        """The rank's part of the network's multiplications, 0..1."""
        return sum(layer.work * layer.slices.own(rank)[1] / sum(layer.slices.channels) for layer in self.layers)


def plan_tensor(material: Material, shares: Sequence[int]) -> TensorPlan:
    """shares: each rank's part of what is computed, as it would be of the batch where that is split."""
    return TensorPlan(layers_of(material.skeleton(), material.example(), shares))


def shares_of_reader(shares: Sequence[int]) -> tuple[int, ...]:
    """The whole batch for one rank, whose samples all others read as well."""
    return tuple(sum(shares) if rank == READER else 0 for rank in range(len(shares)))


def build_tensor(plan: TensorPlan, model: nn.Module, sums: GradientSum, timer: Timer, brake: Brake) -> TensorParallel:
    """Cuts the model, in place. sums: over all ranks."""
    meeting = Meeting(sums, timer)
    if isinstance(model, PacedSlices):
        model.meeting = meeting
    else:
        cut(model, plan.layers, meeting)
    return TensorParallel(model, plan.layers, meeting, timer, brake)


def paced_slices(
    settings: Settings,
    plan: TensorPlan,
    facts: DataSet,
    info: RankInfo,
    pace: Pace,
    metrics: MetricsWriter,
    sizes: Sequence[int],
) -> PacedSlices:
    """sizes: micro-batches of the whole batch. Raises TrainError where the GPU that is stood in for has not enough
    memory, and for what would need its arithmetic.
    """
    refuse_arithmetic(settings)
    anatomy = dissect(settings.model, facts.shape, facts.classes)
    whole = {name: weight.detach() for name, weight in anatomy.model.named_parameters()}
    weights = list(SlicedParts(plan.layers).held(info.rank, whole, anatomy.model).values())
    needed = 3 * bytes_of(*weights) + bytes_of(*anatomy.model.buffers()) + max(sizes) * anatomy.activation_bytes
    if pace.memory_bytes is not None and needed > pace.memory_bytes:
        raise out_of_memory(
            f"its slices and the activations of {max(sizes)} samples",
            needed,
            pace.memory_bytes,
            "use a smaller batch, or accumulate=N; strategy=pipeline splits activations, too",
        )
    clock = StageClock(pace, plan.work(info.rank), 1, seed=(settings.seed, info.rank))
    keep_records(metrics, settings, clock, needed)
    return PacedSlices(weights, clock, plan.layers, info.rank, facts.classes)
