"""Everything that stays the same during a run, its console, and the whole network for an evaluation or checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.compute.arithmetic import Full
from trainer.compute.batch_norm_kernels import BATCHES, average_running_statistics, estimate_running_statistics
from trainer.compute.graphs import Graphs
from trainer.compute.microbatches import MicroBatches
from trainer.compute.models import has_batch_norm, moves_statistics
from trainer.compute.timer import InjectedDelay, Timer
from trainer.data.loading import Batches
from trainer.data.sample_stream import RankBatches, SampleStream
from trainer.paced.standin import StandInOptimizer
from trainer.pipeline.pipeline_strategy import Pipeline
from trainer.ranks.rank_info import RankInfo
from trainer.rebalance.rebalancer import Rebalancer
from trainer.shared.metrics import MetricsWriter
from trainer.shared.settings import Settings
from trainer.strategies import Strategy
from trainer.strategies.base import Unused
from trainer.training.ema import Ema, Evaluation
from trainer.training.loss_sum import Weights
from trainer.training.rates import Clipping, Rates, random_state, set_random_state

if TYPE_CHECKING:
    from trainer.training.rates import Progress


# Prints rank 0's progress, about a line per second, and other ranks' remarks.

INTERVAL_S = 1.0


class Console:
    """Only rank 0 prints, except `aside`. Speeds are over all ranks, without warm-up and evaluations."""

    def __init__(self, info: RankInfo, settings: Settings, steps: int, name: str) -> None:
        self.prints, self.rank = info.rank == 0, info.rank
        self.warmup_steps = settings.warmup_steps if steps > settings.warmup_steps else 0
        self.steps = steps
        self.first_step: int | None = None
        self.samples, self.train_s = 0, 0.0
        self.line_samples, self.line_ms = 0, 0.0
        """Since the last line."""
        self.result: Evaluation | None = None
        self.tokens = settings.tokens if not settings.is_own and settings.data_set.is_text else 0
        self.started_s = time.monotonic()
        self.next_s = self.started_s
        ranks = f"{info.world_size} rank{'s' if info.world_size > 1 else ''}"
        self.paced = " (paced, not computed)" if info.pace else ""
        what = name if settings.is_own else f"{settings.exp}: {settings.model} on {settings.data}"
        how = f"strategy {settings.strategy}, fidelity {settings.fidelity}"
        self.say(f"{what}, batch {settings.batch} over {ranks}, {how}{self.paced}")

    def count(self, step: int, batch: int, step_ms: float) -> None:
        """batch: of all ranks."""
        self.first_step = step if self.first_step is None else self.first_step
        self.line_samples, self.line_ms = self.line_samples + batch, self.line_ms + step_ms
        if step - self.first_step >= self.warmup_steps:
            self.samples += batch
            self.train_s += step_ms / 1000

    def is_due(self, step: int) -> bool:
        return time.monotonic() >= self.next_s or step + 1 >= self.steps

    def step(self, step: int, epoch: int, own: int, loss: float | None, times: Mapping[str, float]) -> None:
        """own: samples of this rank. The speed is the mean since the last line, the times are of this step."""
        self.next_s = time.monotonic() + INTERVAL_S
        mean = f"loss {loss / own:.4f}" if own and loss is not None else "loss -"
        rate = _rate(1000 * self.line_samples / self.line_ms) if self.line_ms else "-"
        self.line_samples, self.line_ms = 0, 0.0
        self.say(
            f"epoch {epoch + 1}  step {step + 1}/{self.steps}  {mean}  {rate} samples/s  "
            f"(load {times['load_ms']:.1f}  compute {times['compute_ms']:.1f}  sync+wait {times['exposed_ms']:.1f}  "
            f"optimiser {times['optim_ms']:.1f} ms)"
        )

    def evaluation(self, epoch: int, train_loss: float, result: Evaluation, bits_per_byte: float | None) -> None:
        self.result = result
        bits = "" if bits_per_byte is None else f"  {bits_per_byte:.4f} bits per byte"
        self.say(
            f"epoch {epoch + 1}  train loss {train_loss:.4f}  test loss {result.loss:.4f}{bits}  "
            f"accuracy {result.accuracy:.2%} of {result.samples}"
        )

    def judged(self, epoch: int, samples: int, found: Mapping[str, float]) -> None:
        """For a script, which names its numbers."""
        self.say("  ".join([f"epoch {epoch + 1}", *(f"{name} {value:.4f}" for name, value in found.items())])
                 + f"  of {samples}")  # fmt: skip

    def reached(self, accuracy: float, updates: int, samples: int) -> None:
        self.say(f"target accuracy reached: {accuracy:.2%} after {updates} updates, {samples:,} samples")

    def finished(self, updates: int) -> None:
        accuracy = f", accuracy {self.result.accuracy:.2%}" if self.result else ""
        speed = self.samples / self.train_s if self.train_s else 0.0
        total_s = time.monotonic() - self.started_s
        tokens = f", {speed * self.tokens:,.0f} tokens/s" if self.tokens else ""
        self.say(f"done: {updates} steps in {total_s:.1f} s, {_rate(speed)} samples/s{tokens}{accuracy}")

    def aside(self, line: str) -> None:
        """For any rank's own log."""
        print(line if self.prints else f"rank {self.rank}: {line}", flush=True)

    def say(self, line: str) -> None:
        if self.prints:
            print(line, flush=True)


def _rate(per_s: float) -> str:
    return f"{per_s:.3g}" if per_s < 100 else f"{per_s:,.0f}"


@dataclass(frozen=True)
class Run:
    settings: Settings
    info: RankInfo
    metrics: MetricsWriter
    console: Console
    device: torch.device
    timer: Timer
    delay: InjectedDelay
    group: dist.ProcessGroup
    model: nn.Module
    strategy: Strategy | Pipeline
    precision: Full
    optimizer: torch.optim.Optimizer | StandInOptimizer
    not_optimised: Sequence[nn.Parameter]
    """Weights that the optimiser lacks."""
    clipping: Clipping | None
    unused: Unused | None
    weights: Weights
    rates: Rates
    ema: Ema | None
    graphs: Graphs | None
    training_task: Any
    """See `trainer.setup.training_task`."""
    order: RankBatches
    micro_batches: MicroBatches
    rebalancer: Rebalancer | None
    batches: Batches
    test_batches: Callable[[], Batches] | None
    batches_of: Callable[[RankBatches], Batches]
    some_samples: Callable[[], Any]
    """A batch for ranks without samples."""
    last_step: int
    learns: bool
    """False if a rank is paced."""

    @property
    def stream(self) -> SampleStream:
        """With the current shares."""
        return self.order.stream


# Lends the whole network to evaluations and checkpoints, then restores its buffers and random generators.
#
# with shared_network(run, progress) as network:           on every rank
#     result = judged(network, run.strategy.outputs(network, batches), classes, run.device)


@contextlib.contextmanager
def shared_network(run: Run, progress: Progress) -> Iterator[nn.Module]:
    """The common weights (with `ema` their average) with matching BatchNorm statistics. Do not change them."""
    with run.ema.in_place() if run.ema else contextlib.nullcontext(), trained_network(run, progress) as network:
        yield network


@contextlib.contextmanager
def trained_network(run: Run, progress: Progress, *, own_weights: bool = False) -> Iterator[nn.Module]:
    """own_weights: the trained weights even if `ema` is on."""
    random, network, again = random_state(), run.strategy.whole(), bool(run.ema) and not own_weights
    # Copies, because an early forward pass of `late` holds the buffers for its backward.
    copies = {id(buffer): buffer.clone() for buffer in network.buffers()}
    own = [(module, dict(module._buffers)) for module in network.modules()]
    for module, buffers in own:
        module._buffers.update({name: copies.get(id(buffer)) for name, buffer in buffers.items()})
    try:
        if run.strategy.parts:
            run.strategy.average_statistics(network, training_images(run), again=again)
        elif has_batch_norm(network):
            keeps = (run.strategy.keeps_statistics and not again) or not moves_statistics(network)
            samples = progress.recent if keeps else estimated_again(run, network)
            average_running_statistics(network, run.group, samples)
        yield network
    finally:
        for module, buffers in own:
            module._buffers.update(buffers)
        set_random_state(random)


def estimated_again(run: Run, network: nn.Module) -> int:
    return estimate_running_statistics(network, training_images(run))


def training_images(run: Run) -> Iterator[Tensor]:
    """This rank's, of the epoch's first updates."""
    for step, (images, *_) in enumerate(run.batches_of(run.order.first(BATCHES))):
        sizes = run.micro_batches.sizes(run.stream.shares_at(step, run.order.epoch), run.order.rank)
        yield from (part for part in images.to(run.device).split(sizes) if len(part))
