"""What each block of a network takes: its work, its weights, and what crosses the cut behind it.

>>> chain = survey("lenet", (1, 28, 28), classes=10)
>>> [block.behind for block in chain]               # of one sample
[(16, 5, 5), (10,)]
>>> balanced(chain, {"v100": 833, "a2000": 333})
((Stage(node='v100', first=0, last=0), Stage(node='a2000', first=1, last=1)),)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compute.buffers import bytes_of, leaves_of
from trainer.compute.models import Taken, how_it_failed, meta_pass, skeleton_of, stages_of, trainable, why_whole
from trainer.shared.errors import TrainError
from trainer.shared.stages import Pipelines, Stage

_SAMPLES = 2  # BatchNorm refuses a single value a channel


@dataclass(frozen=True)
class Block:
    behind: tuple[int, ...]
    """The shape of one sample's activations behind the block: of the last one, its logits."""
    work: float
    """Its part of the network's multiplications, 0..1."""
    kernels: float
    """Its part of the network's layers with weights, 0..1: of what a GPU has to be told for each micro-batch."""
    state_bytes: int
    """Weights, their gradients, SGD's momentum, and the buffers."""
    activation_bytes: int
    """Of one sample, kept from forward to backward; the block's input where the block before does not keep it."""


def survey(name: str, shape: tuple[int, int, int], classes: int) -> list[Block]:
    """Of one of our networks. Raises TrainError where it is not known how it is cut into blocks."""
    return survey_of(skeleton_of(name, shape, classes), torch.zeros(_SAMPLES, *shape, device="meta"), name)


def survey_of(model: nn.Module, activations: Tensor, name: str) -> list[Block]:
    """Of any network on the meta device, called with two samples. Raises TrainError if it cannot be cut into blocks
    that train as the whole does.
    """
    if why := why_whole(model):
        raise TrainError(f"strategy pipeline: {name} {why}; use ddp")
    blocks, shared = stages_of(model), _shared_buffers(model)
    counted: list[Block] = []
    before: Mapping[int, Tensor] = {}
    learns = False
    for number, block in enumerate(blocks):
        taken = _passed(number, block, activations, before)
        if number + 1 < len(blocks):
            _check_output(number, block, activations if learns else None, taken.output, next(model.parameters()).dtype)
        learns = learns or bool(trainable(block))
        counted.append(_block(block, taken))
        if number + 1 < len(blocks):
            activations, before = taken.output.detach().requires_grad_(), taken.kept
    for at, buffer, version in shared:
        if buffer._version != version:
            raise TrainError(f"strategy pipeline: two blocks of {name} share {at} and change it; use ddp")
    work, kernels = sum(one.work for one in counted), sum(one.kernels for one in counted)
    return [
        Block(one.behind, one.work / work, one.kernels / kernels, one.state_bytes, one.activation_bytes)
        for one in counted
    ]


def _passed(number: int, block: nn.Module, inputs: Tensor, before: Mapping[int, Tensor]) -> Taken:
    """Raises TrainError for a block that cannot begin a stage, or cannot be looked at without numbers."""
    try:
        return meta_pass(block, inputs, before)
    except Exception as error:  # whatever the block itself, or torch's meta device, raises
        why = f"it {how_it_failed(error)}"
        if "a leaf Variable that requires grad" in str(error):
            why = "it changes its input in place, which is another host's: write x = x + y, not x += y"
        raise TrainError(f"strategy pipeline: {_called(number, block)}: {why}; use ddp") from error


def _check_output(number: int, block: nn.Module, inputs: Tensor | None, output: Any, dtype: torch.dtype) -> None:
    """inputs: if weights before the block learn. dtype: of the network's weights.

    Raises TrainError unless the output can cross a cut: one tensor, the samples along its first dimension.
    """
    why = ""
    if not isinstance(output, Tensor):
        why = f"returns a {type(output).__name__}, and only one tensor can cross a cut: make it and the next one module"
    elif output.shape[:1] != (_SAMPLES,):
        why = f"returns a tensor of {tuple(output.shape)} for {_SAMPLES} samples, which belong in the first dimension"
    elif output.dtype != dtype:
        why = f"returns {output.dtype}, and the network's weights are {dtype}: give all blocks one type"
    elif inputs is not None and inputs not in leaves_of(output):
        why = "gives no gradient to the blocks before it: freeze their weights (requires_grad_(False))"
    if why:
        raise TrainError(f"strategy pipeline: {_called(number, block)} {why}; or use ddp")


def _called(number: int, block: nn.Module) -> str:
    """By its number and the class of its first layer."""
    first = next(block.children(), block) if type(block) is nn.Sequential else block
    return f"block {number} ({type(first).__name__})"


def _shared_buffers(model: nn.Module) -> list[tuple[str, Tensor, int]]:
    """Those of several modules, which each stage gets a copy of: name, buffer, and how often it has been changed."""
    found: dict[int, str] = {}
    shared: dict[int, tuple[str, Tensor, int]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if found.setdefault(id(buffer), name) != name:
            shared[id(buffer)] = (found[id(buffer)], buffer, buffer._version)
    return list(shared.values())


def _block(block: nn.Module, taken: Taken) -> Block:
    """work and kernels: not yet as parts of the network's."""
    weights, buffers = list(block.parameters()), list(block.buffers())
    return Block(
        behind=tuple(taken.output.shape[1:]) if isinstance(taken.output, Tensor) else (),
        work=sum(visit.work for visit in taken.visits),
        kernels=len(taken.visits),
        state_bytes=3 * bytes_of(*weights) + bytes_of(*buffers),
        activation_bytes=sum(tensor.untyped_storage().nbytes() for tensor in taken.kept.values()) // _SAMPLES,
    )


def balanced(chain: Sequence[Block], speeds: Mapping[str, float]) -> Pipelines:
    """One pipeline over these hosts, in their order: each cut lies where the work before it comes closest to the part
    that the hosts before it do of all. Each has one block at least. speeds: in any unit. Raises ValueError where there
    are more hosts than blocks.
    """
    if len(speeds) > len(chain):
        raise ValueError(f"{len(speeds)} stages for the network's {len(chain)} blocks: each holds one; use fewer hosts")
    done, total = [0.0, *accumulate(block.work for block in chain)], sum(speeds.values())
    ends: list[int] = []
    reached = 0.0
    for number, speed in enumerate(list(speeds.values())[:-1]):
        reached += speed / total
        first, last = (ends[-1] if ends else 0) + 1, len(chain) - (len(speeds) - 1 - number)
        ends.append(min(range(first, last + 1), key=lambda end: abs(done[end] - reached)))
    begins = [0, *ends]
    return (
        tuple(
            Stage(name, begin, end - 1) for name, begin, end in zip(speeds, begins, [*ends, len(chain)], strict=True)
        ),
    )


# What crosses the two cuts of a stage, and what goes with it from the first stage to the last.


@dataclass(frozen=True)
class Form:
    """Of one sample's labels."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Cuts:
    before: tuple[int, ...] | None
    """Shape of one sample's activations before the stage; None of the first stage."""
    behind: tuple[int, ...] | None
    """And behind it; None of the last stage."""
    dtype: torch.dtype
    """Of the numbers that travel."""
    labels: Form = Form()

    def check_output(self, output: Tensor, samples: int) -> Tensor:
        """Raises TrainError for what the next stage does not expect."""
        _check("the activations at a cut", output.shape, (samples, *(self.behind or ())))
        return output

    def check_labels(self, labels: Tensor, samples: int) -> Tensor:
        """Likewise the last one."""
        _check("labels", (*labels.shape, labels.dtype), (samples, *self.labels.shape, self.labels.dtype))
        return labels


def _check(what: str, found: Sequence[object], wanted: Sequence[object]) -> None:
    if tuple(found) != tuple(wanted):
        words = [" x ".join(map(str, one)) for one in (found, wanted)]
        raise TrainError(
            f"strategy pipeline: {what} are {words[0]}, and the data set's first samples make them {words[1]}: let "
            "`collate` give all samples one shape and type, or use ddp"
        )
