"""Surveys a network's blocks, checks that it can be cut, and balances the cuts.

>>> chain = survey("lenet", (1, 28, 28), classes=10)
>>> [block.behind for block in chain]               # of one sample
[(16, 5, 5), (10,)]
>>> balanced(chain, {"v100": 833, "a2000": 333})
((Stage(node='v100', first=0, last=0), Stage(node='a2000', first=1, last=1)),)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compute.buffers import bytes_of, leaves_of
from trainer.compute.models import Taken, how_it_failed, meta_pass, skeleton_of, stages_of, trainable, why_whole
from trainer.shared.errors import TrainError
from trainer.shared.stages import Pipelines, Stage

_SAMPLES = 2  # BatchNorm refuses a single value per channel


@dataclass(frozen=True)
class Block:
    behind: tuple[int, ...]
    """Output shape of one sample."""
    work: float
    """Its part of the network's multiplications, 0..1."""
    kernels: float
    """Its part of the layers with weights, 0..1."""
    weight_bytes: int
    buffer_bytes: int
    activation_bytes: int
    """Per sample, kept for backward."""


def survey(name: str, shape: tuple[int, int, int], classes: int) -> list[Block]:
    """Raises TrainError if the network cannot be cut."""
    return survey_of(skeleton_of(name, shape, classes), torch.zeros(_SAMPLES, *shape, device="meta"), name)


def survey_of(model: nn.Module, activations: Tensor, name: str) -> list[Block]:
    """On the meta device, with two samples. Raises TrainError."""
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
    work, kernels = sum(block.work for block in counted), sum(block.kernels for block in counted)
    return [replace(block, work=block.work / work, kernels=block.kernels / kernels) for block in counted]


def _passed(number: int, block: nn.Module, inputs: Tensor, before: Mapping[int, Tensor]) -> Taken:
    """Raises TrainError if the block cannot begin a stage."""
    try:
        return meta_pass(block, inputs, before)
    except Exception as error:  # errors of the block, or of torch's meta device
        why = f"it {how_it_failed(error)}"
        if "a leaf Variable that requires grad" in str(error):
            why = "it changes its input in place, which belongs to another host: write x = x + y, not x += y"
        raise TrainError(f"strategy pipeline: {_called(number, block)}: {why}; use ddp") from error


def _check_output(number: int, block: nn.Module, inputs: Tensor | None, output: Any, dtype: torch.dtype) -> None:
    """Raises TrainError unless the output is one tensor, samples first. inputs: if earlier weights are trained."""
    why = ""
    if not isinstance(output, Tensor):
        why = f"returns a {type(output).__name__}, but only a tensor can cross a cut: join it and the next block"
    elif output.shape[:1] != (_SAMPLES,):
        why = (
            f"returns a tensor of {tuple(output.shape)} for {_SAMPLES} samples, but samples must be the first dimension"
        )
    elif output.dtype != dtype:
        why = f"returns {output.dtype}, but the network's weights are {dtype}: give all blocks one type"
    elif inputs is not None and inputs not in leaves_of(output):
        why = "gives no gradient to the blocks before it: freeze their weights (requires_grad_(False))"
    if why:
        raise TrainError(f"strategy pipeline: {_called(number, block)} {why}; or use ddp")


def _called(number: int, block: nn.Module) -> str:
    first = next(block.children(), block) if type(block) is nn.Sequential else block
    return f"block {number} ({type(first).__name__})"


def _shared_buffers(model: nn.Module) -> list[tuple[str, Tensor, int]]:
    """Name, buffer and version; each stage gets a copy."""
    found: dict[int, str] = {}
    shared: dict[int, tuple[str, Tensor, int]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if found.setdefault(id(buffer), name) != name:
            shared[id(buffer)] = (found[id(buffer)], buffer, buffer._version)
    return list(shared.values())


def _block(block: nn.Module, taken: Taken) -> Block:
    """work, kernels: absolute."""
    weights, buffers = list(block.parameters()), list(block.buffers())
    return Block(
        behind=tuple(taken.output.shape[1:]) if isinstance(taken.output, Tensor) else (),
        work=sum(visit.work for visit in taken.visits),
        kernels=len(taken.visits),
        weight_bytes=bytes_of(*weights),
        buffer_bytes=bytes_of(*buffers),
        activation_bytes=sum(tensor.untyped_storage().nbytes() for tensor in taken.kept.values()) // _SAMPLES,
    )


def balanced(chain: Sequence[Block], speeds: Mapping[str, float]) -> Pipelines:
    """One pipeline over these hosts, with a block each at least. speeds: in any unit. Raises ValueError."""
    if len(speeds) > len(chain):
        raise ValueError(
            f"{len(speeds)} stages for the network's {len(chain)} blocks: each stage needs a block; use fewer hosts"
        )
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


@dataclass(frozen=True)
class Form:
    """One sample's labels."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Cuts:
    before: tuple[int, ...] | None
    """Per sample; None for the first stage."""
    behind: tuple[int, ...] | None
    """Per sample; None for the last stage."""
    dtype: torch.dtype
    """In transfers."""
    labels: Form = Form()

    def check_output(self, output: Tensor, samples: int) -> Tensor:
        """Raises TrainError."""
        _check("the activations at a cut", output.shape, (samples, *(self.behind or ())))
        return output

    def check_labels(self, labels: Tensor, samples: int) -> Tensor:
        """Raises TrainError."""
        _check("labels", (*labels.shape, labels.dtype), (samples, *self.labels.shape, self.labels.dtype))
        return labels


def _check(what: str, found: Sequence[object], wanted: Sequence[object]) -> None:
    if tuple(found) != tuple(wanted):
        words = [" x ".join(map(str, sizes)) for sizes in (found, wanted)]
        raise TrainError(
            f"strategy pipeline: {what} are {words[0]}, but {words[1]} for the data set's first samples: let "
            "`collate` give all samples one shape and type, or use ddp"
        )
