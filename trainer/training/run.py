"""Everything that stays the same during a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.compute.arithmetic import Full
from trainer.compute.graphs import Graphs
from trainer.compute.microbatches import MicroBatches
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
from trainer.training.ema import Ema
from trainer.training.loss_sum import Weights
from trainer.training.rank_console import Console
from trainer.training.rates import Clipping, Rates


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
