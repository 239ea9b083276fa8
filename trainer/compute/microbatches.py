"""Cuts a rank's part of an update into micro-batches, whose gradients add up. Imports no torch.

>>> MicroBatches(accumulate=0, caps=(None, 128), together=False).sizes((40, 200), rank=1)
(100, 100)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from trainer.shared.shares import micro_batch_sizes


class MicroBatches:
    """accumulate: per rank, 0 for as few as fit. caps: largest micro-batch of each rank. together: all ranks use the
    largest count. smaller_first: the part by which the first micro-batch is smaller than the others. least: samples
    that accumulate leaves in each; BatchNorm needs two.
    """

    def __init__(
        self,
        accumulate: int,
        caps: Sequence[int | None],
        together: bool,
        smaller_first: float = 0.0,
        least: int = 2,
    ) -> None:
        self.accumulate, self.caps, self.together = accumulate, list(caps), together
        self.smaller_first, self.least = smaller_first, least

    def sizes(self, shares: Sequence[int], rank: int) -> tuple[int, ...]:
        how = self.accumulate, self.together, rank, self.smaller_first, self.least
        return _sizes(tuple(shares), tuple(self.caps), *how)

    def largest(self, shares: Sequence[int]) -> int:
        return max(len(self.sizes(shares, rank)) for rank in range(len(shares)))


@functools.lru_cache(maxsize=1024)  # every step asks the same
def _sizes(
    shares: tuple[int, ...],
    caps: tuple[int | None, ...],
    accumulate: int,
    together: bool,
    rank: int,
    smaller_first: float,
    least: int,
) -> tuple[int, ...]:
    counts = [_count(share, cap, accumulate, least) for share, cap in zip(shares, caps, strict=True)]
    count = max(counts) if together else counts[rank]
    filled = max(counts[rank], min(count, shares[rank] // least))
    return micro_batch_sizes(shares[rank], filled, smaller_first) + (0,) * (count - filled)


def _count(share: int, cap: int | None, accumulate: int, least: int) -> int:
    # If each needs two samples and the cap is two, an odd share has one micro-batch of three.
    forced = -(-share // cap) if cap else 1
    if cap != 1:
        forced = min(forced, share // least)
    return max(1, forced, min(accumulate, share // least))
