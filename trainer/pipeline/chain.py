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

import torch
from torch import Tensor, nn

from trainer.compute.flat_buffer import bytes_of
from trainer.compute.meta_pass import Taken, meta_pass
from trainer.compute.models import skeleton_of, stages_of
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
    """Of any network on the meta device, called with two samples. Raises TrainError as `survey` does."""
    blocks = stages_of(model)
    if not blocks:
        raise TrainError(f"strategy pipeline: {name} is no chain of blocks that could be cut; use ddp")
    counted: list[Block] = []
    before: Mapping[int, Tensor] = {}
    for block in blocks:
        taken = meta_pass(block, activations, before)
        counted.append(_block(block, taken))
        activations, before = taken.output, taken.kept
    work, kernels = sum(one.work for one in counted), sum(one.kernels for one in counted)
    return [
        Block(one.behind, one.work / work, one.kernels / kernels, one.state_bytes, one.activation_bytes)
        for one in counted
    ]


def _block(block: nn.Module, taken: Taken) -> Block:
    """work and kernels: not yet as parts of the network's."""
    weights, buffers = list(block.parameters()), list(block.buffers())
    return Block(
        behind=tuple(taken.output.shape[1:]),
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
