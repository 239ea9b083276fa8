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
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainer.paced.anatomy import Anatomy
from trainer.shared.errors import TrainError
from trainer.shared.gpu_work import Work
from trainer.shared.pace import BACKWARD, FORWARD, OPTIMISER, Pace
from trainer.stream import RankBatches
from trainer.worker import Worker


class Clock:
    """Where the time comes from; a test may bring its own."""

    now = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)


class Stopwatch:
    """One step after the other: when its parts have to be ready, and how late they were."""

    def __init__(self, pace: Pace, seed: object = 0, clock: Any = Clock) -> None:
        self.pace, self.seed, self.clock = pace, seed, clock
        self.step = 0
        self.step_s = 0.0
        self.update_s = 0.0  # of all micro-batches so far
        self.began_s = 0.0
        self.started = False
        self.updating = False
        self.late_s: list[float] = []  # of each micro-batch, and as a part of what it should have taken
        self.lateness: list[float] = []

    def start(self) -> None:
        """The step begins now; without this, with its forward pass."""
        self.began_s = self.clock.now()
        self.started = True

    def begin(self, samples: int) -> None:
        """The forward pass begins; that of a further micro-batch of the update, when the one before is due."""
        if self.updating and not self.started:
            self.began_s += (FORWARD + BACKWARD) * self.step_s
        else:
            if not self.started:
                self.start()
            self.step += 1
            self.update_s = 0.0
        self.started, self.updating = False, True
        self.step_s = self.pace.step_s(samples, self.step - 1, self.seed)
        self.update_s += self.step_s

    def postpone(self, held_up_s: float) -> None:
        """What is left of this step is due so much later: otherwise it would make up for a pause made on purpose."""
        self.began_s += held_up_s

    def until(self, part: float) -> None:
        """Waits until so much of the step has passed, 0..1."""
        self._wait(self.began_s + part * self.step_s)

    def backward_ended(self) -> None:
        late_s = max(0.0, self.clock.now() - self.began_s - (FORWARD + BACKWARD) * self.step_s)
        self.late_s.append(late_s)
        self.lateness.append(late_s / self.step_s)

    def keep(self, deadline_s: float) -> None:
        """Work beside the step is over then; what the CPU is late counts for the step whose backward ended last."""
        self._wait(deadline_s)
        late_s = max(0.0, self.clock.now() - deadline_s)
        if self.late_s:
            self.late_s[-1] += late_s
            self.lateness[-1] += late_s / self.step_s

    def optimise(self) -> None:
        """The update begins when the gradients of all ranks are there, whenever that is."""
        self.updating = False
        self._wait(self.clock.now() + OPTIMISER * self.update_s)

    def median_lateness(self, warmup_steps: int) -> float | None:
        """Over the steps after the warm-up, as a part of a step; None where there was none."""
        measured = self.lateness[warmup_steps:] or self.lateness
        return statistics.median(measured) if measured else None

    def _wait(self, deadline_s: float) -> None:
        left_s = deadline_s - self.clock.now()
        if left_s > 0:
            self.clock.sleep(left_s)


class StandInWorker(Worker):
    """Keeps the time that a GPU takes for its work, one after the other, and does none of it."""

    SHORT_S = 0.5e-3
    """No sleep is as exact as this; what is shorter is made up for with the work that follows."""

    def __init__(self, stopwatch: Stopwatch, is_beside: bool = False) -> None:
        self.stopwatch, self.is_beside = stopwatch, is_beside
        self.free_s = 0.0

    def __call__(self, work: Work, arithmetic: Callable[[], object]) -> None:
        clock = self.stopwatch.clock
        now_s = clock.now()
        self.free_s = max(self.free_s, now_s) + work.seconds(self.stopwatch.pace.gb_per_s)
        if self.free_s - now_s < self.SHORT_S:
            return
        if self.is_beside:
            clock.sleep(self.free_s - now_s)
        else:
            self.stopwatch.keep(self.free_s)

    def beside(self) -> StandInWorker:
        return StandInWorker(self.stopwatch, is_beside=True)


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
        self.stopwatch.until(FORWARD)
        return output


class _Layer(torch.autograd.Function):
    """Passes its input on; in backward gives each weight a gradient, not before the layer's time has come."""

    @staticmethod
    def forward(context: Any, output: Tensor, stopwatch: Stopwatch, release: float, is_first: bool, *weights: Tensor):
        context.stopwatch, context.release, context.is_first, context.weights = stopwatch, release, is_first, weights
        return output.clone()

    @staticmethod
    def backward(context: Any, output_gradient: Tensor):
        # The weights under another name: a copy of each would take this CPU longer than a fast GPU its whole backward.
        gradients = [weight.detach() for weight in context.weights]
        context.stopwatch.until(context.release)
        if context.is_first:
            context.stopwatch.backward_ended()
        return output_gradient, None, None, None, *gradients


class BlankBatches:
    """As many images as the rank's share and nothing in them: a paced rank has no use for data."""

    def __init__(self, order: RankBatches, shape: tuple[int, int, int]) -> None:
        self.order, self.shape = order, shape

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        blank = torch.zeros(1)
        stream = self.order.stream
        for step in range(self.order.first_step, stream.steps):
            samples = stream.shares_at(step, self.order.epoch)[self.order.rank]
            yield blank.expand(samples, *self.shape), torch.zeros(samples, dtype=torch.long)


def keep_freed_memory() -> None:
    """Tells the C library not to hand freed memory back to the kernel: to get it anew for each step's gradients, page
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
        raise TrainError(
            f"out of memory: {samples} samples take {needed / 2**30:.1f} GiB, the GPU that this rank stands in for has "
            f"{pace.memory_bytes / 2**30:.1f} GiB: at most {fits} samples fit; use a smaller batch, or accumulate=N"
        )
    return needed


def most_samples(anatomy: Anatomy, pace: Pace) -> int | None:
    """That the GPU has memory for; None where its memory is not told."""
    if pace.memory_bytes is None:
        return None
    return max(0, (pace.memory_bytes - anatomy.state_bytes) // anatomy.activation_bytes)


class StandInOptimizer:
    """Takes the time of an update and leaves the weights alone."""

    def __init__(self, model: StandIn) -> None:
        self.model = model

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.stopwatch.start()  # freeing takes the CPU milliseconds, a GPU no time
        self.model.zero_grad(set_to_none)

    def step(self) -> None:
        self.model.stopwatch.optimise()
