"""Times whole updates of any size: `Subject(...).update(samples)`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from trainer.compute.arithmetic import Full
from trainer.compute.buffers import drop_gradients
from trainer.compute.timer import Timer
from trainer.paced.standin import StandIn, StandInOptimizer
from trainer.shared.experiments import DataSet
from trainer.shared.metrics import LATE
from trainer.strategies import cross_entropy_sum, local_loss

Result = TypeVar("Result")


@dataclass(frozen=True)
class Times:
    """One update's, or medians."""

    step_ms: float
    forward_ms: float
    optim_ms: float
    lateness: float | None = None
    """As a part of a step; None unless paced."""

    @property
    def kept_pace(self) -> bool:
        return self.lateness is None or self.lateness <= LATE


class NoMemory(Exception):
    """A batch does not fit; `str(error)` may be the reason."""


class Trainee:
    """A network to measure."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | StandInOptimizer,
        precision: Full,
        device: torch.device,
        timer: Timer,
    ) -> None:
        self.model, self.optimizer, self.precision = model, optimizer, precision
        self.device, self.timer = device, timer
        self._samples = 0

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """The network's input and the loss's target."""
        raise NotImplementedError

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def attempt(self, samples: int, run: Callable[[], Result]) -> Result:
        """Raises NoMemory, and frees memory, if the device has too little."""
        # A new size begins with an empty cache, like a run with it.
        if samples != self._samples:
            self._empty_cache()
        self._samples = samples
        try:
            return run()
        except RuntimeError as error:
            if not (why := out_of_memory(error)):
                raise
        # Outside `except`, where the traceback's frames no longer hold memory.
        self.optimizer.zero_grad(set_to_none=True)
        self._empty_cache()
        raise NoMemory(why)

    def _empty_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class Subject(Trainee):
    """room: samples that a simulated GPU's memory holds. held: occupies the memory that a run keeps besides."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | StandInOptimizer,
        precision: Full,
        facts: DataSet,
        device: torch.device,
        timer: Timer,
        room: int | None,
        held: Tensor,
    ) -> None:
        super().__init__(model, optimizer, precision, device, timer)
        self.facts, self.room, self.held = facts, room, held

    def update(self, samples: int) -> Times:
        """Raises NoMemory."""
        if self.room is not None and samples > self.room:
            raise NoMemory
        return self.attempt(samples, lambda: self._update(*self.batch(samples)))

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_sum(outputs, targets)

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        labels = torch.zeros(samples, *self.facts.label_shape, dtype=torch.long, device=self.device)
        if isinstance(self.model, StandIn):
            return torch.zeros(1).expand(samples, *self.facts.shape), labels
        return torch.randn(samples, *self.facts.shape, device=self.device), labels

    def _update(self, images: Tensor, labels: Tensor) -> Times:
        begin = self.timer.mark()
        drop_gradients(self.optimizer)
        with self.precision.autocast():
            loss = local_loss(self.model, images, labels) / len(labels)
        forwarded = self.timer.mark()
        self.precision.scaled(loss).backward()
        self.precision.unscale(self.optimizer)
        computed = self.timer.mark()
        self.precision.step(self.optimizer)
        end = self.timer.mark()
        self.timer.wait()
        lateness = self.model.stopwatch.lateness[-1] if isinstance(self.model, StandIn) else None
        step_ms, forward_ms = self.timer.ms(begin, end), self.timer.ms(begin, forwarded)
        return Times(step_ms, forward_ms, self.timer.ms(computed, end), lateness)


def out_of_memory(error: RuntimeError) -> str:
    """The matching line, or "" for another error."""
    # torch's allocator, cuBLAS and cuDNN have different messages. cuDNN, if no engine has memory for its workspace,
    # reports a missing engine (pytorch/pytorch#108645).
    return next((line[:200] for line in str(error).splitlines() if _NO_MEMORY.search(line)), "")


_NO_MEMORY = re.compile(
    r"out of memory|ALLOC_FAILED|unable to find an engine|unable to find a valid cudnn algorithm", re.IGNORECASE
)
