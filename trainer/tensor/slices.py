"""Which channels of a layer each rank computes. Pure.

slices = cut_channels(64, groups=1, shares=(73, 183))       Slices(channels=(18, 46), ...)
slices.own(rank=1)                                          (18, 46): its first channel, and how many
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.shared.shares import scale_shares


@dataclass(frozen=True)
class Slices:
    """Output channels of one layer by rank, in the order of ranks; some may have none."""

    channels: tuple[int, ...]
    groups: tuple[int, ...]
    """The layer's groups that these are; 1 a rank of a layer that has a single one."""

    def own(self, rank: int) -> tuple[int, int]:
        """The rank's first channel, and how many."""
        return sum(self.channels[:rank]), self.channels[rank]


def cut_channels(channels: int, groups: int, shares: Sequence[int]) -> Slices:
    """In the proportion of the shares, by the largest remainder. A grouped layer is cut between its groups, each of
    which reads input channels of its own; where it has few of them that is coarse.
    """
    if groups == 1:
        return Slices(scale_shares(shares, channels), (1,) * len(shares))
    of_ranks = scale_shares(shares, groups)
    return Slices(tuple(count * channels // groups for count in of_ranks), of_ranks)
