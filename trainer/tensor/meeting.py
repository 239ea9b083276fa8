"""Where the ranks meet in a pass: outputs are gathered, and gradients of inputs added up.

meeting = Meeting(sums, timer)
whole = meeting.gather(own, channels=(18, 46), axis=1)      every rank's channels, in the order of ranks
meeting.add_up(gradient)                                    in place
spans, held_up_s = meeting.take()                           when, and how long this rank was held up on purpose
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.compute.timer import Timer
from trainer.shared import gpu_work
from trainer.strategies.gradient_sum import GradientSum

Spans = list[tuple[Any, Any]]


class Meeting:
    """sums: over all ranks; what it travels in is what activations travel in, too."""

    def __init__(self, sums: GradientSum, timer: Timer) -> None:
        self.sums, self.timer = sums, timer
        self.group = sums.group
        self.rank, self.size = self.group.rank(), self.group.size()
        self.on_cpu = dist.get_backend(self.group) == "gloo"
        self._spans: Spans = []
        self._held_up_s = sums.held_up_s

    def __deepcopy__(self, _: object) -> Meeting:
        """A copy of a network meets the same ranks: a script's own average is such a copy."""
        return self

    def gather(self, own: Tensor, channels: Sequence[int], axis: int) -> Tensor:
        """own: this rank's channels, all others' differ in their number alone."""
        sent = self._sent(own)
        parts = [sent if rank == self.rank else _like(sent, count, axis) for rank, count in enumerate(channels)]
        self.gather_into(parts)
        return torch.cat(parts, axis).to(own.device, own.dtype)

    def gather_into(self, parts: Sequence[Tensor]) -> None:
        """By rank: this one's is there, the others' are written into. As messages from one to another, which may differ
        in size; a collective would have all padded to the largest.
        """
        begin = self.timer.mark()
        if self.sums.dtype:  # what rounding, and the way back, take a GPU that is stood in for
            self.sums.executor(gpu_work.cast(2 * 4 * sum(part.numel() for part in parts)), lambda: None)
        self.sums.hold_up()
        self._exchange(parts)
        self._spans.append((begin, self.timer.mark()))

    def _exchange(self, parts: Sequence[Tensor]) -> None:
        own, others = parts[self.rank], [rank for rank in range(self.size) if rank != self.rank]
        # Each begins with the rank behind it, so that not all send to one.
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
        """Since the last call: marks of begin and end of each meeting, and the seconds for which `slow` held this rank
        up before them.
        """
        spans, self._spans = self._spans, []
        held_up_s, self._held_up_s = self.sums.held_up_s - self._held_up_s, self.sums.held_up_s
        return spans, held_up_s

    def _message(self, how: Any, tensor: Tensor, rank: int) -> Any:
        return dist.P2POp(how, tensor, dist.get_global_rank(self.group, rank), self.group)

    def _sent(self, own: Tensor) -> Tensor:
        """This rank's channels as they travel: in one piece of memory, where the group can see it."""
        if self.sums.dtype and own.dtype == torch.float32:
            own = own.to(self.sums.dtype)
        return (own.cpu() if self.on_cpu else own).contiguous()


def _like(own: Tensor, channels: int, axis: int) -> Tensor:
    shape = list(own.shape)
    shape[axis] = channels
    return own.new_empty(shape)
