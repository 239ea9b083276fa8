"""A network that keeps a GPU's time instead of computing: what a paced rank trains.

    standin = StandIn(dissect("resnet152", (3, 32, 32), 10), pace, clock)
    standin(images).sum().backward()       takes as long as the pace says; every gradient exists when its time has come

Everything that the other ranks and the network notice is real: the parameters and their shapes, autograd's hooks as
backward goes from the last layer to the first, and every byte on the wire. The numbers are not: gradients are the
weights themselves, so that a paced run has neither loss nor accuracy.

A step's moments are deadlines, counted from its begin: forward ends at FORWARD * T, each layer's gradients are released
when backward would have got there. What the CPU spends on them lies within T. Were the times slept one after another,
a V100's stand-in would reach 0.56 of its speed. What a GPU does to gradients beside its steps (`gpu_work`) is time
alone, too: the numbers are left as they are.
"""

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
from trainer.compute.executor import Executor
from trainer.compute.models import Visit, meta_pass, skeleton_of, stages_of
from trainer.paced.stopwatch import StageClock, Stopwatch
from trainer.shared.errors import TrainError
from trainer.shared.gpu_work import Work
from trainer.shared.pace import BACKWARD, FORWARD, Pace


class StandIn(nn.Module):
    """Parameters and buffers like the network's own, in its order; takes images, gives logits of no meaning."""

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
            # Backward reaches this layer's gradients when all later layers and itself are through.
            release = FORWARD + BACKWARD * (1 - done)
            self.layers.append((release, [like[index] for index in layer.parameters]))
            done += layer.work

    def forward(self, images: Tensor) -> Tensor:
        self.stopwatch.begin(len(images))
        output = images.new_zeros((len(images), self.classes))
        for number, (release, weights) in enumerate(self.layers):
            output = _Layer.apply(output, self.stopwatch, release, number == 0, *weights)
        output = self.answer(images, output)
        self.stopwatch.until(FORWARD)
        return output

    def answer(self, images: Tensor, blank: Tensor) -> Tensor:
        """What comes of these images: nothing."""
        return blank


class _Layer(torch.autograd.Function):
    """Passes its input on; in backward gives each weight a gradient, not before the layer's time has come."""

    @staticmethod
    def forward(
        context: Any, output: Tensor, stopwatch: Stopwatch, release: float, is_first: bool, *weights: Tensor
    ) -> Tensor:
        context.stopwatch, context.release, context.is_first, context.weights = stopwatch, release, is_first, weights
        return output.clone()

    @staticmethod
    def backward(context: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The weights under another name: a copy of each would take this CPU longer than a fast GPU its whole backward.
        gradients = [weight.detach() for weight in context.weights]
        context.stopwatch.until(context.release)
        if context.is_first:
            context.stopwatch.backward_ended()
        return output_gradient, None, None, None, *gradients


class StandInOptimizer:
    """Takes the time of an update and leaves the weights alone."""

    def __init__(self, model: StandIn | PacedPart) -> None:
        self.model = model

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """What has a learning rate: nothing."""
        return []

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.stopwatch.start()  # freeing takes the CPU milliseconds, a GPU no time
        self.model.zero_grad(set_to_none)

    def step(self) -> None:
        self.model.stopwatch.optimise()


# What a paced rank of a pipeline holds: weights of a stage that keeps a GPU's time, and perhaps a part that learns.


class PacedPart(nn.Module):
    """Weights like the stage's own."""

    def __init__(self, like: Sequence[Tensor], stopwatch: StageClock) -> None:
        super().__init__()
        self.stopwatch = stopwatch
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(one.shape).normal_(std=1e-3)) for one in like)


class LearningPart(PacedPart):
    """Beside weights like a stage's own, which are zeros here and stay it, the part of a smaller network that learns.

    What comes in and goes out are rows of numbers, as many as the stage's own would be: the network's, and zeros.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        stopwatch: StageClock,
        network: nn.Module,
        before: tuple[int, ...] | None,
        sent: int | None,
    ) -> None:
        """before: the shape of one sample that the network takes; None of images. sent: numbers of one sample that
        leave; None of the last stage.
        """
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


# What a network is made of, without computing it: its layers' work, and what a sample takes in memory.
#
# >>> anatomy = dissect("lenet", (1, 28, 28), classes=10)
# >>> anatomy.layers[0].parameters            # positions in the order of model.parameters()
# (0, 1)
# >>> anatomy.activation_bytes                # of one sample, kept from forward to backward
# 48080

_SAMPLES = 2  # BatchNorm refuses a single value a channel
_LAYERS = 64
"""Layers are joined until there are about this many: finer than any bucket, and few enough to cost nothing."""


@dataclass(frozen=True)
class LayerGroup:
    """Neighbouring layers, taken as one."""

    parameters: tuple[int, ...]
    """Positions in the order of `model.parameters()`."""
    work: float
    """Its part of the forward pass, 0..1."""


@dataclass(frozen=True)
class Anatomy:
    """What a stand-in has to know of a network."""

    model: nn.Module
    """The network on the meta device."""
    layers: tuple[LayerGroup, ...]
    """In the order in which forward visits them."""
    activation_bytes: int

    @property
    def state_bytes(self) -> int:
        """Weights, their gradients, SGD's momentum, and the buffers."""
        return 3 * bytes_of(*self.model.parameters()) + bytes_of(*self.model.buffers())


def dissect(name: str, shape: tuple[int, int, int], classes: int) -> Anatomy:
    """Raises TrainError for a network that is no chain of blocks: nobody knows when its layers' gradients are due."""
    model, images = skeleton_of(name, shape, classes), torch.zeros(_SAMPLES, *shape, device="meta")
    if not stages_of(model):
        raise TrainError(f"paced: {name} is no chain of blocks whose time could be kept; use a ResNet, or leave it out")
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


# Work on gradients that takes a GPU's time and changes no number.


class StandInExecutor(Executor):
    """Keeps the time that a GPU takes for its work, one after the other."""

    SHORT_S = 0.5e-3
    """No sleep is as exact as this; what is shorter is made up for with the work that follows."""

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
        """None of it."""

    def beside(self) -> StandInExecutor:
        return StandInExecutor(self.stopwatch, is_beside=True)


# A stand-in that learns: a small network makes its real updates within the time of a large one that is stood in for.
#
#     learner = Learner(dissect("resnet152", (3, 32, 32), 10), stopwatch, build_model("lenet", (1, 28, 28), 10))
#     cross_entropy(learner(images), labels).backward()       the small network's gradients, at the large one's moments
#
# To the other ranks it is the large one: as many bytes are exchanged, when its backward would have them. These are
# zeros,
# so that no norm and no average of gradients differs from the small network's. A run is valid where the CPU did the
# small
# network's work within the large one's time.


class Learner(StandIn):
    """anatomy: of the network that is stood in for. network: the one that learns; its weights come last, so that their
    gradients are among the first that backward has.
    """

    def __init__(self, anatomy: Anatomy, stopwatch: Stopwatch, network: nn.Module, classes: int) -> None:
        super().__init__(anatomy, stopwatch, classes)
        with torch.no_grad():
            for weight in self.weights:
                weight.zero_()  # a stand-in's gradients are its weights
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(images)
        logits: Tensor = self.network(images)  # evaluation, and statistics that are estimated again
        return logits

    def answer(self, images: Tensor, blank: Tensor) -> Tensor:
        """Backward visits first what forward did last, which is this: its arithmetic is done before anything is due."""
        logits: Tensor = self.network(images)
        return blank + logits


class LearnerExecutor(StandInExecutor):
    """Does the work on gradients, and keeps the time that the GPU would take for it."""

    def do(self, arithmetic: Callable[[], object]) -> None:
        arithmetic()

    def beside(self) -> LearnerExecutor:
        return LearnerExecutor(self.stopwatch, is_beside=True)


class LearnerOptimizer(StandInOptimizer):
    """Updates the network that learns, within the time of the large one's update."""

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


# Memory of a paced rank: what the GPU would need, and what the C library keeps.


def keep_freed_memory() -> None:
    """Has the C library keep freed memory: to get it from the kernel again for each step's gradients, page
    by page, would cost more CPU than all the rest (mallopt(3); another C library than glibc may not have it).
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, -1)


def memory_needed(anatomy: Anatomy, pace: Pace, samples: int) -> int:
    """Bytes that training with so many samples would take on the GPU. Raises TrainError where it has fewer."""
    needed = anatomy.state_bytes + samples * anatomy.activation_bytes
    fits = most_samples(anatomy, pace)
    if fits is not None and pace.memory_bytes is not None and samples > fits:
        remedy = "use a smaller batch, or accumulate=N"
        if not fits:
            alone = f"the network takes {anatomy.state_bytes / 2**30:.1f} GiB by itself"
            remedy = f"{alone}: strategy=pipeline gives each host a part of it"
        raise out_of_memory(f"{samples} samples", needed, pace.memory_bytes, f"at most {fits} samples fit; {remedy}")
    return needed


def out_of_memory(what: str, needed_bytes: int, has_bytes: int, remedy: str) -> TrainError:
    """what: takes more than the GPU that the rank stands in for has; in the plural."""
    return TrainError(
        f"out of memory: {what} take {needed_bytes / 2**30:.1f} GiB, the GPU that this rank stands in for has "
        f"{has_bytes / 2**30:.1f} GiB: {remedy}"
    )


def most_samples(anatomy: Anatomy, pace: Pace) -> int | None:
    """How many samples the GPU has memory for; None where its memory is not known."""
    if pace.memory_bytes is None:
        return None
    return max(0, (pace.memory_bytes - anatomy.state_bytes) // anatomy.activation_bytes)
