"""How a rank's part of an update is cut into micro-batches: `sizes = MicroBatches(...).sizes(shares, rank)`.

    >>> MicroBatches(accumulate=0, caps=(None, 128), together=False).sizes((40, 200), rank=1)
    (100, 100)

A micro-batch goes forward and backward by itself, the gradients add up, and one exchange and one update follow. Imports
no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from trainer.shared.shares import equal_shares


class MicroBatches:
    """accumulate: how many each rank takes, 0 as few as fit. caps: the most samples that each rank has memory for, None
    where that is not known. together: all ranks take as many as the one that needs most, since they meet in each.
    """

    def __init__(self, accumulate: int, caps: Sequence[int | None], together: bool) -> None:
        self.accumulate, self.caps, self.together = accumulate, list(caps), together

    def sizes(self, shares: Sequence[int], rank: int) -> tuple[int, ...]:
        """The micro-batches of one rank, as even as whole samples allow; without samples it is an empty one."""
        return _sizes(tuple(shares), tuple(self.caps), self.accumulate, self.together, rank)

    def largest(self, shares: Sequence[int]) -> int:
        """How many micro-batches the rank with most of them takes."""
        return max(len(self.sizes(shares, rank)) for rank in range(len(shares)))


@functools.lru_cache(maxsize=1024)  # each step asks for the same
def _sizes(
    shares: tuple[int, ...], caps: tuple[int | None, ...], accumulate: int, together: bool, rank: int
) -> tuple[int, ...]:
    counts = [_count(share, cap, accumulate) for share, cap in zip(shares, caps, strict=True)]
    count = max(counts) if together else counts[rank]
    filled = max(counts[rank], min(count, shares[rank] // 2))
    return equal_shares(shares[rank], filled) + (0,) * (count - filled)


def _count(share: int, cap: int | None, accumulate: int) -> int:
    """The number of micro-batches. Each has two samples at least where memory holds two, since BatchNorm can make
    nothing of one. Where it holds just two, an odd share has one micro-batch of three.
    """
    forced = -(-share // cap) if cap else 1
    if cap != 1:
        forced = min(forced, share // 2)
    return max(1, forced, min(accumulate, share // 2))
