"""Networks that take a GPU's time instead of computing, for paced ranks; a smaller network may learn meanwhile.

Parameters, autograd's hooks and all transfers are real. Gradients are the weights themselves.
"""
# All moments are deadlines from the step's begin, so CPU time counts within them. With separate sleeps, a V100's
# stand-in would only reach 0.56 of its speed.

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compute.buffers import bytes_of
from trainer.compute.compiler import Executor
from trainer.compute.models import Visit, meta_pass, skeleton_of, stages_of
from trainer.paced.stopwatch import StageClock, Stopwatch
from trainer.shared.errors import TrainError
from trainer.shared.gpu_work import Work
from trainer.shared.pace import BACKWARD, FORWARD, Pace
from trainer.shared.strategy_table import STATES


class StandIn(nn.Module):
    """Returns meaningless logits."""

    def __init__(self, anatomy: Anatomy, stopwatch: Stopwatch, classes: int) -> None:
        super().__init__()
        self.anatomy = anatomy
        self.stopwatch = stopwatch
        self.classes = classes
        like = [nn.Parameter(torch.empty(p.shape).normal_(std=1e-3)) for p in anatomy.model.parameters()]
        self.weights = nn.ParameterList(like)
        for index, buffer in enumerate(anatomy.model.buffers()):
            self.register_buffer(f"buffer{index}", torch.zeros(buffer.shape, dtype=buffer.dtype))
        self.layers = []
        done = 0.0
        for layer in anatomy.layers:
            # Backward reaches this layer after all later layers.
            release = FORWARD + BACKWARD * (1 - done)
            self.layers.append((release, [like[index] for index in layer.parameters]))
            done += layer.work

    def forward(self, images: Tensor) -> Tensor:
        self.stopwatch.begin(len(images))
        output = torch.zeros((len(images), self.classes), device=images.device)
        for number, (release, weights) in enumerate(self.layers):
            output = _Layer.apply(output, self.stopwatch, release, number == 0, *weights)
        output = self.answer(images, output)
        self.stopwatch.until(FORWARD)
        return output

    def answer(self, images: Tensor, blank: Tensor) -> Tensor:
        """The smaller network's output, if any."""
        return blank


class _Layer(torch.autograd.Function):
    """The identity; backward gives each weight a gradient when its layer is due."""

    @staticmethod
    def forward(
        context: Any, output: Tensor, stopwatch: Stopwatch, release: float, is_first: bool, *weights: Tensor
    ) -> Tensor:
        context.stopwatch, context.release, context.is_first, context.weights = stopwatch, release, is_first, weights
        return output.clone()

    @staticmethod
    def backward(context: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Aliases of the weights: copies would take longer than a fast GPU's whole backward.
        gradients = [weight.detach() for weight in context.weights]
        context.stopwatch.until(context.release)
        if context.is_first:
            context.stopwatch.backward_ended()
        return output_gradient, None, None, None, *gradients


class StandInOptimizer:
    """Takes the time of an update."""

    def __init__(self, model: StandIn | PacedPart) -> None:
        self.model = model

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """No learning rates."""
        return []

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.stopwatch.start()  # freeing takes the CPU milliseconds, a GPU no time
        self.model.zero_grad(set_to_none)

    def step(self) -> None:
        self.model.stopwatch.optimise()


class PacedPart(nn.Module):
    def __init__(self, like: Sequence[Tensor], stopwatch: StageClock) -> None:
        super().__init__()
        self.stopwatch = stopwatch
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(tensor.shape).normal_(std=1e-3)) for tensor in like)


class LearningPart(PacedPart):
    """Has zero weights like a stage's, and a part of a smaller network that learns. Inputs and outputs are padded to
    the stage's size.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        stopwatch: StageClock,
        network: nn.Module,
        before: tuple[int, ...] | None,
        sent: int | None,
    ) -> None:
        """before: the network's input shape; None for images. sent: output numbers; None on the last stage."""
        super().__init__(like, stopwatch)
        with torch.no_grad():
            for weight in self.weights:
                weight.zero_()
        self.network, self.before, self.sent = network, before, sent

    def forward(self, inputs: Tensor) -> Tensor:
        if self.before is not None:
            inputs = inputs[:, : math.prod(self.before)].unflatten(1, self.before)
        output: Tensor = self.network(inputs)
        if self.sent is None:
            return output
        output = output.flatten(1)
        return nn.functional.pad(output, (0, self.sent - output.shape[1]))


_SAMPLES = 2  # BatchNorm refuses a single value per channel
_LAYERS = 64
"""Groups of layers, finer than any bucket."""


@dataclass(frozen=True)
class LayerGroup:
    parameters: tuple[int, ...]
    """Indices in `model.parameters()`."""
    work: float
    """Its part of the multiplications, 0..1."""


@dataclass(frozen=True)
class Anatomy:
    """A network without numbers."""

    model: nn.Module
    """On the meta device."""
    layers: tuple[LayerGroup, ...]
    """In forward's order."""
    activation_bytes: int
    states: int = STATES["sgd"]
    """Copies of the weights."""

    @property
    def state_bytes(self) -> int:
        """All copies of the weights, and buffers."""
        return self.states * bytes_of(*self.model.parameters()) + bytes_of(*self.model.buffers())


def dissect(name: str, shape: tuple[int, int, int], classes: int) -> Anatomy:
    """Raises TrainError unless the network is a chain of blocks.

    >>> dissect("lenet", (1, 28, 28), classes=10).activation_bytes      # per sample
    48080
    """
    model, images = skeleton_of(name, shape, classes), torch.zeros(_SAMPLES, *shape, device="meta")
    if not stages_of(model):
        raise TrainError(
            f"paced: {name} is not a chain of blocks, so its times are unknown; use a ResNet, or leave paced out"
        )
    taken = meta_pass(model, images)
    kept_bytes = sum(tensor.untyped_storage().nbytes() for tensor in taken.kept.values())
    return Anatomy(model, _joined(model, taken.visits), kept_bytes // _SAMPLES)


def _joined(model: nn.Module, visits: Sequence[Visit]) -> tuple[LayerGroup, ...]:
    position = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    total = sum(visit.work for visit in visits)
    layers: list[LayerGroup] = []
    parameters: tuple[int, ...] = ()
    work = 0.0
    for visit in visits:
        parameters += tuple(position[id(parameter)] for parameter in visit.parameters)
        work += visit.work / total
        if work >= 1 / _LAYERS:
            layers.append(LayerGroup(parameters, work))
            parameters, work = (), 0.0
    return (*layers, LayerGroup(parameters, work)) if parameters else tuple(layers)


class StandInExecutor(Executor):
    """Takes the time of a GPU's work on gradients."""

    SHORT_S = 0.5e-3
    """Shorter than a sleep's precision: added to the next work."""

    def __init__(self, stopwatch: Stopwatch | StageClock, is_beside: bool = False) -> None:
        self.stopwatch, self.is_beside = stopwatch, is_beside
        self.free_s = 0.0

    def __call__(self, work: Work, arithmetic: Callable[[], object]) -> None:
        clock = self.stopwatch.clock
        began_s = clock.now()
        self.do(arithmetic)
        self.free_s = max(self.free_s, began_s) + work.seconds(self.stopwatch.pace.gb_per_s)
        if self.free_s - began_s < self.SHORT_S:
            return
        if not self.is_beside:
            self.stopwatch.keep(self.free_s)
        elif (left_s := self.free_s - clock.now()) > 0:
            clock.sleep(left_s)

    def do(self, arithmetic: Callable[[], object]) -> None:
        """Nothing."""

    def beside(self) -> StandInExecutor:
        return StandInExecutor(self.stopwatch, is_beside=True)


class Learner(StandIn):
    """The smaller `network` learns. The other weights are zeros, so that norms and averages are the network's."""

    # The network's weights come last, so that backward computes their gradients first. A run is valid if the CPU did
    # that within the simulated network's time.

    def __init__(self, anatomy: Anatomy, stopwatch: Stopwatch, network: nn.Module, classes: int) -> None:
        super().__init__(anatomy, stopwatch, classes)
        with torch.no_grad():
            for weight in self.weights:
                weight.zero_()  # a stand-in's gradients are its weights
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(images)
        logits: Tensor = self.network(images)  # evaluation, and estimates of statistics
        return logits

    def answer(self, images: Tensor, blank: Tensor) -> Tensor:
        # Last in forward, so first in backward: computed before anything is due.
        logits: Tensor = self.network(images)
        return blank[:, 0].view(-1, *[1] * (logits.dim() - 1)) + logits


class LearnerExecutor(StandInExecutor):
    """Does the work, too."""

    def do(self, arithmetic: Callable[[], object]) -> None:
        arithmetic()

    def beside(self) -> LearnerExecutor:
        return LearnerExecutor(self.stopwatch, is_beside=True)


class LearnerOptimizer(StandInOptimizer):
    """Updates the network that learns."""

    def __init__(self, model: Learner | LearningPart, own: torch.optim.Optimizer) -> None:
        super().__init__(model)
        self.own = own

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.own.param_groups

    def step(self) -> None:
        began_s = self.model.stopwatch.clock.now()
        self.own.step()
        self.model.stopwatch.optimise(began_s)


def keep_freed_memory() -> None:
    # glibc keeps freed memory (mallopt(3)): getting it from the kernel again for each step's gradients, page by page,
    # would cost more CPU than all the rest.
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, -1)


def memory_needed(anatomy: Anatomy, pace: Pace, samples: int) -> int:
    """Bytes on the GPU. Raises TrainError if it has fewer."""
    needed = anatomy.state_bytes + samples * anatomy.activation_bytes
    fits = most_samples(anatomy, pace)
    if fits is not None and samples > fits:
        remedy = "use a smaller batch, or accumulate=N"
        if not fits:
            alone = f"the network takes {anatomy.state_bytes / 2**30:.1f} GiB by itself"
            remedy = f"{alone}: strategy=pipeline gives each host a part of it"
        check_memory(pace, needed, f"{samples} samples", f"at most {fits} samples fit; {remedy}")
    return needed


def check_memory(pace: Pace, needed_bytes: int, what: str, remedy: str) -> None:
    """what: a plural noun. Raises TrainError if the simulated GPU has less memory."""
    if pace.memory_bytes is not None and needed_bytes > pace.memory_bytes:
        raise TrainError(
            f"out of memory: {what} take {needed_bytes / 2**30:.1f} GiB, the GPU that this rank simulates has "
            f"{pace.memory_bytes / 2**30:.1f} GiB: {remedy}"
        )


def most_samples(anatomy: Anatomy, pace: Pace) -> int | None:
    """None if the memory is unknown."""
    if pace.memory_bytes is None:
        return None
    return max(0, (pace.memory_bytes - anatomy.state_bytes) // anatomy.activation_bytes)
