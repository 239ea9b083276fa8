"""Delays gradients of weights until gradients of inputs, for which the previous stage waits, are sent.

    >>> network, later = nn.Sequential(nn.Linear(3, 2)), Later()
    >>> split_backward(network, later)
    >>> network(torch.ones(1, 3)).sum().backward()
    >>> network[0].weight.grad is None, network[0].bias.grad
    (True, tensor([1., 1.]))
    >>> with torch.no_grad():
    ...     for work in later.cut():
    ...         work()
    >>> network[0].weight.grad
    tensor([[1., 1., 1.],
            [1., 1., 1.]])

Gradients are bit-identical to autograd's: the same functions compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.compute.models import has_weight_hooks
from trainer.pipeline.stage_layout import MicroBatch
from trainer.shared.stages import StageSchedule, Task

Work = Callable[[], None]


class Later:
    """Delayed work, in autograd's order."""

    def __init__(self) -> None:
        self._works: list[Work] = []

    def add(self, work: Work) -> None:
        self._works.append(work)

    def cut(self) -> list[Work]:
        """All since the last call."""
        works, self._works = self._works, []
        return works


def split_backward(network: nn.Module, later: Later) -> None:
    """In place. Delays the weight gradients of convolutions and linear layers."""
    for module in network.modules():
        if not _is_plain(module):
            continue
        if type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
            module.forward = partial(_convolved, module, later)  # type: ignore[method-assign]
        elif type(module) is nn.Linear:
            module.forward = partial(_linear, module, later)  # type: ignore[method-assign]


def _is_plain(module: nn.Module) -> bool:
    """Whether weight and forward are the class's own, without hooks."""
    weight = module._parameters.get("weight")  # missing if a hook computes it, as for spectral_norm
    if weight is None or has_weight_hooks(weight):
        return False
    forward = vars(module).get("forward")  # of another stage perhaps, which was split before
    return forward is None or getattr(forward, "func", None) in (_convolved, _linear)


def _convolved(module: nn.Conv2d, later: Later, images: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        output: Tensor = module._conv_forward(images, module.weight, module.bias)
    else:
        output = _Convolution.apply(images, module.weight, module.bias, module, later)
    return output


def _linear(module: nn.Linear, later: Later, inputs: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return nn.functional.linear(inputs, module.weight, module.bias)
    output: Tensor = _Product.apply(inputs, module.weight, module.bias, later)
    return output


def added(weight: Tensor, gradient: Tensor) -> None:
    """Like autograd: in the weight's type and memory format, as a fused optimiser requires."""
    gradient = gradient.to(weight.dtype)
    if weight.grad is None:
        same = gradient.stride() == weight.stride()
        weight.grad = gradient if same else torch.empty_like(weight).copy_(gradient)
    else:
        weight.grad += gradient


def _cast(*tensors: Tensor | None) -> list[Any]:
    """Like autocast."""
    kind = next(tensor.device.type for tensor in tensors if tensor is not None)
    to = autocast_type(kind)
    return list(tensors) if to is None else [None if tensor is None else tensor.to(to) for tensor in tensors]


def autocast_type(kind: str) -> torch.dtype | None:
    """None if autocast is off."""
    if hasattr(torch, "get_autocast_dtype"):  # torch 2.4 or newer; warns about the older names
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, images: Tensor, weight: Tensor, bias: Tensor | None, module: nn.Conv2d, later: Later
    ) -> Tensor:
        cast_images, cast_weight, cast_bias = _cast(images, weight, bias)
        context.save_for_backward(cast_images, cast_weight)
        context.weight, context.bias, context.module, context.later = weight, bias, module, later
        output: Tensor = module._conv_forward(cast_images, cast_weight, cast_bias)
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        images, weight = context.saved_tensors
        parameter, module = context.weight, context.module
        sizes = None if context.bias is None else list(context.bias.shape)
        shape = (module.stride, module.padding, module.dilation, False, (0, 0), module.groups)

        def derived(mask: list[bool]) -> tuple[Any, ...]:
            found: tuple[Any, ...] = torch.ops.aten.convolution_backward(gradient, images, weight, sizes, *shape, mask)
            return found

        of_images, of_weight, of_bias = context.needs_input_grad[:3]
        if of_weight:
            context.later.add(lambda: added(parameter, derived([False, True, False])[1]))
        of_images, _, of_bias = derived([of_images, False, of_bias])
        return of_images, None, of_bias, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        cast_inputs, cast_weight, cast_bias = _cast(inputs, weight, bias)
        context.save_for_backward(cast_inputs, cast_weight)
        context.weight, context.later = weight, later
        return nn.functional.linear(cast_inputs, cast_weight, cast_bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs, weight = context.saved_tensors
        parameter = context.weight

        def of_weight() -> None:
            added(parameter, gradient.flatten(0, -2).t() @ inputs.flatten(0, -2))

        if context.needs_input_grad[1]:
            context.later.add(of_weight)
        of_inputs = gradient @ weight if context.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if context.needs_input_grad[2] else None
        return of_inputs, None, of_bias, None


@dataclass(frozen=True)
class Done:
    """A task of an update with its marks. number: of the micro-batch, counted on in the next update."""

    task: Task
    number: int
    begin: Any
    end: Any
    since: Any
    """Begin of a wait for the task's data, or None."""
    came_s: float | None
    """Arrival of data from another rank (time.perf_counter), or None."""
    sent: Any
    """Hand-over of the result to another rank, or None."""


class PipelineUpdate:
    """One rank's update; tasks in the order of `trainer.shared.stages`, as data arrive."""

    def __init__(
        self,
        pipeline: Any,
        own: Sequence[MicroBatch],
        following: Sequence[MicroBatch],
        parts: Sequence[tuple[Tensor, Tensor]],
        batch: int,
        number: int,
    ) -> None:
        """pipeline: a Pipeline. own: micro-batches of this rank. following: micro-batches of the next update that may
        go forward during this one. parts: images and labels of both on the first stage. batch, number: as in its
        `update`.
        """
        self.of, self.own, self.both, self.parts = pipeline, own, [*own, *following], parts
        self.batch, self.number = batch, number
        self.schedule = StageSchedule(
            len(own), pipeline.in_flight, pipeline.stage.splits, len(following), forwards=len(pipeline.early)
        )
        self.done: list[Done] = []

    def run(self) -> Generator[tuple[Tensor, Tensor], Tensor, tuple[Tensor, list[Done]]]:
        """On the last stage yields each micro-batch's inputs and labels, and receives the sum of its losses."""
        timer = self.of.timer
        if self.of.stage.learns:
            self.of.stage.begin([one.size for one in self.own], self.of.late.sets if self.of.late else ())
        if not self.own:
            self.of.tell()
        while not self.schedule.is_over:
            task, since = self._take()
            begin = timer.mark()
            number, came_s, sent = yield from self._do(task)
            self.done.append(Done(task, number, begin, timer.mark(), since, came_s, sent))
            if len(self.done) > 1:
                timer.wait_for(self.done[-2].end)  # chooses the next task only when the device is ready for it
        return self.of.stage.total.clone(), self.done

    def _take(self) -> tuple[Task, Any]:
        """The next task, and the mark at which a wait for it began."""
        with self.of.news:
            if task := self._next():
                return task, None
            since = self.of.timer.mark()
            while not (task := self._next()):
                self.of.news.wait()
            return task, since

    def _next(self) -> Task | None:
        schedule = self.schedule
        return schedule.take(
            has_input=schedule.forwards < len(self.both) and self._has_input(self.both[schedule.forwards]),
            has_gradient=schedule.may_backward and self._has_gradient(self.own[schedule.backwards]),
        )

    def _has_input(self, one: MicroBatch) -> bool:
        of = self.of
        images: bool = of.is_first or of.inputs[one.ranks[of.number - 1]].has_arrived
        labels: bool = not of.labels or of.labels[one.ranks[0]].has_arrived
        return images and labels

    def _has_gradient(self, one: MicroBatch) -> bool:
        came: bool = self.of.is_last or self.of.gradients[one.ranks[self.of.number + 1]].has_arrived
        return came

    def _do(self, task: Task) -> Generator[tuple[Tensor, Tensor], Tensor, tuple[int, float | None, Any]]:
        """Micro-batch number, arrival of its data, and hand-over of its result."""
        if task is Task.FORWARD:
            return (yield from self._forward(self.both[self.schedule.forwards - 1], self.schedule.forwards - 1))
        if task is Task.BACKWARD:
            return self._backward(self.own[self.schedule.backwards - 1])
        self.of.stage.weights()
        return self.own[self.schedule.weights - 1].number, None, None

    def _forward(
        self, one: MicroBatch, index: int
    ) -> Generator[tuple[Tensor, Tensor], Tensor, tuple[int, float | None, Any]]:
        of, labels, there_s, sent = self.of, None, 0.0, None
        if of.is_first:
            inputs, labels = self.parts[index]
            if of.to_last:
                of.to_last[one.ranks[-1]].send(of.cuts.check_labels(labels, one.size))
        else:
            incoming = of.inputs[one.ranks[of.number - 1]]
            there_s, inputs = incoming.arrived_s, incoming.take()
            labels = of.labels[one.ranks[0]].take() if of.labels else None
        if of.is_last and of.stage.learns:
            inputs = of.stage.enter(inputs)
            of.stage.judge(inputs, (yield inputs, cast(Tensor, labels)), there_s)
        else:
            output = of.stage.forward(inputs, there_s, self._weights(index))
        if not of.is_last:
            sent = of.timer.mark()
            of.to_next[one.ranks[of.number + 1]].send(of.cuts.check_output(output, one.size))
        elif self.schedule.forwards == self.schedule.count:
            of.tell()
        return one.number, there_s or None, sent

    def _weights(self, index: int) -> dict[str, Tensor] | None:
        late = self.of.late
        return late.weights_of(self.number + (index >= self.schedule.count)) if late else None

    def _backward(self, one: MicroBatch) -> tuple[int, float | None, Any]:
        of = self.of
        if one is self.own[0]:
            of.delay.pause("backward")
        gradient, there_s, sent = None, 0.0, None
        if not of.is_last:
            incoming = of.gradients[one.ranks[of.number + 1]]
            there_s, gradient = incoming.arrived_s, incoming.take()
        gradient = of.stage.backward(gradient, self.batch, there_s)
        if gradient is not None and not of.is_first:
            sent = of.timer.mark()
            of.to_before[one.ranks[of.number - 1]].send(gradient.to(of.cuts.dtype))
        return one.number, there_s or None, sent
