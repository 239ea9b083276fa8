"""Layers that compute a slice of their output channels on each rank: which ones, how they are
cut, and their exchanges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from trainer.compute.models import has_hooks, how_it_failed, skeleton_of, storage_of
from trainer.compute.timer import Timer
from trainer.shared import gpu_work
from trainer.shared.errors import TrainError
from trainer.shared.shares import scale_shares
from trainer.strategies.gradient_sum import GradientSum


def cut(model: nn.Module, layers: Sequence[Layer], meeting: Meeting) -> nn.Module:
    """In place. layers: from `survey`; a layer that is called twice occurs twice."""
    for layer in layers:
        parent, _, name = layer.name.rpartition(".")
        holder, whole = model.get_submodule(parent), model.get_submodule(layer.name)
        if not isinstance(whole, Sliced):
            kind: type[Sliced] = SlicedConv2d if isinstance(whole, nn.Conv2d) else SlicedLinear
            setattr(holder, name, kind(whole, layer.slices, meeting, layer.axis))
    return model


# Forward computes the slice from the whole input and gathers the others. Backward gives whole gradients for the slice's
# weights, and for the input a part of the sum over ranks (Shoeybi et al. 2019, for pairs of layers).


class Sliced(nn.Module):
    """Weight and bias keep their names in the state."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: Any, slices: Slices, meeting: Meeting, axis: int) -> None:
        super().__init__()
        self.slices, self.meeting, self.axis = slices, meeting, axis
        self.first, self.count = slices.own(meeting.rank)
        for name in ("weight", "bias"):
            whole = getattr(layer, name)
            self.register_parameter(name, None if whole is None else self._slice_of(whole))

    def _slice_of(self, whole: nn.Parameter) -> nn.Parameter:
        own = whole.detach().narrow(0, self.first, self.count).clone()
        return nn.Parameter(own, requires_grad=whole.requires_grad)

    def forward(self, inputs: Tensor) -> Tensor:
        whole: Tensor = _Gather.apply(self.compute(_AddUp.apply(inputs, self.meeting)), self)
        return whole

    def compute(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError


class SlicedLinear(Sliced):
    def compute(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)


class SlicedConv2d(Sliced):
    def __init__(self, layer: Any, slices: Slices, meeting: Meeting, axis: int) -> None:
        super().__init__(layer, slices, meeting, axis)
        self.how: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
        self.groups = slices.groups[meeting.rank]
        self.first_input = 0
        if layer.groups > 1:
            self.first_input = sum(slices.groups[: meeting.rank]) * self.weight.shape[1]

    def compute(self, inputs: Tensor) -> Tensor:
        if not self.count:
            return self._compute_nothing(inputs)
        if self.groups * self.weight.shape[1] < inputs.shape[1]:
            inputs = inputs.narrow(1, self.first_input, self.groups * self.weight.shape[1])
        return conv2d(inputs, self.weight, self.bias, groups=self.groups, **self.how)

    def _compute_nothing(self, inputs: Tensor) -> Tensor:
        # torch refuses a convolution without channels, so this computes one and drops it.
        inputs = inputs.narrow(1, 0, self.weight.shape[1])
        weight = torch.cat([self.weight, self.weight.new_zeros(1, *self.weight.shape[1:])])
        bias = None if self.bias is None else torch.cat([self.bias, self.bias.new_zeros(1)])
        return conv2d(inputs, weight, bias, **self.how).narrow(1, 0, 0)


class _AddUp(torch.autograd.Function):
    """The identity; backward sums gradients over ranks."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, meeting: Meeting) -> Tensor:
        context.meeting = meeting
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # In at least 32 bits: with rounding to 16 after each addition, the sum would depend on the number of ranks.
        summed = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        context.meeting.add_up(summed)
        return summed.to(gradient.dtype), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, own: Tensor, layer: Sliced) -> Tensor:
        context.layer = layer
        return layer.meeting.gather(own, layer.slices.channels, layer.axis)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layer = context.layer
        return gradient.narrow(layer.axis, layer.first, layer.count), None


@dataclass(frozen=True)
class Slices:
    """Output channels of one layer by rank; may be 0."""

    channels: tuple[int, ...]
    groups: tuple[int, ...]
    """Groups by rank; 1 for a layer with a single group."""

    def own(self, rank: int) -> tuple[int, int]:
        """The rank's first channel, and their number."""
        return sum(self.channels[:rank]), self.channels[rank]


def cut_channels(channels: int, groups: int, shares: Sequence[int]) -> Slices:
    """In the proportion of `shares`. Grouped layers are cut between groups."""
    if groups == 1:
        return Slices(scale_shares(shares, channels), (1,) * len(shares))
    of_ranks = scale_shares(shares, groups)
    return Slices(tuple(count * channels // groups for count in of_ranks), of_ranks)


# Other weights (BatchNorm's) are equal on every rank without an exchange, because activations and gradients are.


@dataclass(frozen=True)
class Layer:
    """A cut layer. takes, gives: shapes of a sample's input and output."""

    name: str
    slices: Slices
    work: float
    """Its part of the network's multiplications, 0..1."""
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    axis: int
    """The dimension of the channels in the output."""


def is_cut(module: nn.Module) -> bool:
    # No subclasses: attention's are never called, or their weights are read elsewhere. No layers with hooks or their
    # own forward, which a slice would lose.
    if has_hooks(module) or "forward" in vars(module):
        return False
    weights = [module._parameters.get(name) for name in ("weight", "bias")]
    if weights[0] is None or any(weight is not None and weight._backward_hooks for weight in weights):
        return False  # without a weight: a hook computes it from others
    return type(module) is nn.Linear or (type(module) is nn.Conv2d and module.padding_mode == "zeros")


def _names_of_cut(model: nn.Module) -> set[str]:
    # Layers whose weights are also used elsewhere stay whole, on every rank.
    used = Counter(storage_of(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    read = {id(layer) for encoder in encoders for layer in encoder.children()}
    return {
        name
        for name, module in model.named_modules()
        if is_cut(module)
        and id(module) not in read  # the encoder's fast path in evaluations reads its layers' weights
        and all(used[storage_of(weight)] == 1 for weight in module.parameters(recurse=False))
    }


def survey(name: str, shape: tuple[int, int, int], classes: int, shares: Sequence[int]) -> tuple[Layer, ...]:
    """In the order of forward. shares: in any unit."""
    return layers_of(skeleton_of(name, shape, classes), torch.zeros(2, *shape, device="meta"), shares)


def layers_of(model: nn.Module, images: Tensor, shares: Sequence[int]) -> tuple[Layer, ...]:
    """images: at least two. Both on torch's meta device."""
    visits: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    names = _names_of_cut(model)
    hooks = [
        module.register_forward_hook(_remember(name, visits)) for name, module in model.named_modules() if name in names
    ]
    try:
        model(images)
    except Exception as error:  # errors of the network, or of torch's meta device
        raise TrainError(f"strategy tensor: {type(model).__name__} {how_it_failed(error)}; use ddp") from error
    for hook in hooks:
        hook.remove()
    works = [_work(module, output) for _, module, _, output in visits]
    return tuple(
        Layer(
            name,
            _slices(module, shares),
            work / sum(works),
            tuple(inputs.shape[1:]),
            tuple(output.shape[1:]),
            1 if isinstance(module, nn.Conv2d) else output.dim() - 1,
        )
        for (name, module, inputs, output), work in zip(visits, works, strict=True)
    )


def _remember(name: str, visits: list[tuple[str, nn.Module, Tensor, Tensor]]) -> Any:
    def visit(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        visits.append((name, module, inputs[0], output))

    return visit


def _slices(module: Any, shares: Sequence[int]) -> Slices:
    groups = module.groups if isinstance(module, nn.Conv2d) else 1
    return cut_channels(len(module.weight), groups, shares)


def _work(module: Any, output: Tensor) -> float:
    return float(module.weight.numel() * output.numel() / len(module.weight))


Spans = list[tuple[Any, Any]]


class Meeting:
    """Exchanges of a pass: gathers outputs and sums gradients. sums: over all ranks; its dtype
    is also for activations.
    """

    def __init__(self, sums: GradientSum, timer: Timer) -> None:
        self.sums, self.timer = sums, timer
        self.group = sums.group
        self.rank, self.size = self.group.rank(), self.group.size()
        self.on_cpu = dist.get_backend(self.group) == "gloo"
        self._spans: Spans = []
        self._held_up_s = sums.held_up_s

    def __deepcopy__(self, _: object) -> Meeting:
        # A copied network uses the same ranks: a script may average by copying.
        return self

    def gather(self, own: Tensor, channels: Sequence[int], axis: int) -> Tensor:
        """own: this rank's channels. Returns all channels, by rank."""
        sent = self._sent(own)
        parts = [sent if rank == self.rank else _like(sent, count, axis) for rank, count in enumerate(channels)]
        self.gather_into(parts)
        return torch.cat(parts, axis).to(own.device, own.dtype)

    def gather_into(self, parts: Sequence[Tensor]) -> None:
        """parts: by rank; this rank's is sent, the others are overwritten."""
        # Messages may differ in size; a collective would pad them to the largest.
        begin = self.timer.mark()
        if self.sums.dtype:  # times the rounding of a simulated GPU
            self.sums.executor(gpu_work.cast(2 * 4 * sum(part.numel() for part in parts)), lambda: None)
        self.sums.hold_up()
        self._exchange(parts)
        self._spans.append((begin, self.timer.mark()))

    def _exchange(self, parts: Sequence[Tensor]) -> None:
        own, others = parts[self.rank], [rank for rank in range(self.size) if rank != self.rank]
        # Each begins with the next rank, so that not all send to one.
        others = others[self.rank :] + others[: self.rank]
        asked = [self._message(dist.isend, own, rank) for rank in others if own.numel()]
        asked += [self._message(dist.irecv, parts[rank], rank) for rank in reversed(others) if parts[rank].numel()]
        for work in dist.batch_isend_irecv(asked) if asked else ():
            work.wait()

    def add_up(self, gradient: Tensor) -> None:
        begin = self.timer.mark()
        self.sums.sum(gradient)
        self._spans.append((begin, self.timer.mark()))

    def take(self) -> tuple[Spans, float]:
        """Since the last call: begin and end of each exchange, and the injected delay in seconds."""
        spans, self._spans = self._spans, []
        held_up_s, self._held_up_s = self.sums.held_up_s - self._held_up_s, self.sums.held_up_s
        return spans, held_up_s

    def _message(self, how: Any, tensor: Tensor, rank: int) -> Any:
        return dist.P2POp(how, tensor, dist.get_global_rank(self.group, rank), self.group)

    def _sent(self, own: Tensor) -> Tensor:
        if self.sums.dtype and own.dtype == torch.float32:
            own = own.to(self.sums.dtype)
        return (own.cpu() if self.on_cpu else own).contiguous()


def _like(own: Tensor, channels: int, axis: int) -> Tensor:
    shape = list(own.shape)
    shape[axis] = channels
    return own.new_empty(shape)
