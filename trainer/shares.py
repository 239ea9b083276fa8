"""How a batch is split over ranks: whole samples, nothing lost, nothing twice. Imports no torch.

equal_shares(64, 3)              (22, 21, 21)
scale_shares((22, 21, 21), 10)   (4, 3, 3)
"""

from __future__ import annotations

from collections.abc import Sequence


def equal_shares(batch: int, world_size: int) -> tuple[int, ...]:
    """`batch` samples over `world_size` ranks, no two shares further apart than one; the first ranks take the rest."""
    whole, rest = divmod(batch, world_size)
    return tuple(whole + (rank < rest) for rank in range(world_size))


def scale_shares(shares: Sequence[int], batch: int) -> tuple[int, ...]:
    """`batch` samples in the proportion of `shares` (their sum at least 1), by the largest remainder.

    Each share comes out less than one sample from its exact part; a tie goes to the lower rank.
    """
    total = sum(shares)
    scaled = [share * batch // total for share in shares]
    remainder = [share * batch % total for share in shares]
    largest_first = sorted(range(len(shares)), key=lambda rank: -remainder[rank])
    for rank in largest_first[: batch - sum(scaled)]:
        scaled[rank] += 1
    return tuple(scaled)
