"""Sets up tensor parallelism, and the common parts of paced ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from trainer.compute.buffers import bytes_of
from trainer.compute.timer import InjectedDelay, Timer
from trainer.paced.standin import dissect, keep_freed_memory, out_of_memory
from trainer.paced.stopwatch import StageClock, Stopwatch
from trainer.ranks.rank_info import RankInfo
from trainer.setup.training_task import TrainingTask
from trainer.shared.errors import TrainError
from trainer.shared.experiments import DataSet
from trainer.shared.metrics import MetricsWriter
from trainer.shared.pace import Pace
from trainer.shared.settings import Settings
from trainer.shared.strategy_table import STRATEGIES
from trainer.strategies.gradient_sum import GradientSum
from trainer.tensor.sliced_layers import Layer, Meeting, cut, layers_of
from trainer.tensor.tensor_strategy import READER, PacedSlices, SlicedParts, TensorParallel


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


def refuse_arithmetic(settings: Settings) -> None:
    """Raises TrainError for settings that need real arithmetic."""
    asked = {f"strategy={settings.strategy}": not STRATEGIES[settings.strategy].on_paced}
    asked["sync_bn=true"] = settings.sync_bn
    asked[f"amp={settings.amp}"] = settings.amp != "none"
    asked["weights=FILE"] = bool(settings.weights)
    asked[f"ema={settings.ema:g}"] = settings.ema > 0
    asked[f"clip_norm={settings.clip_norm:g}"] = settings.clip_norm > 0
    for setting, is_set in asked.items():
        if is_set:
            raise TrainError(
                f"{setting} needs ranks that compute, but this rank is paced: leave it out, or leave paced out"
            )


def keep_records(
    metrics: MetricsWriter, settings: Settings, stopwatch: Stopwatch | StageClock, needed_bytes: int
) -> None:
    """Records the simulated GPU's memory and this rank's lateness."""
    keep_freed_memory()
    metrics.peak_memory_bytes = lambda: needed_bytes
    metrics.lateness = lambda: stopwatch.median_lateness(settings.warmup_steps)
