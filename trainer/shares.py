"""How a batch is split over ranks: whole samples, nothing lost, nothing twice. Imports no torch.

equal_shares(64, 3)              (22, 21, 21)
scale_shares((22, 21, 21), 10)   (4, 3, 3)

    wanted = parse_shares("v100=5,a2000=2")
    choose_shares(wanted, ranks=(("v100", 0), ("a2000", 0)), batch=64)      (46, 18)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Wanted = Mapping[tuple[str, int | None], int]
"""What is said of each (node, local rank), or of all ranks of a node (None)."""


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


def parse_shares(text: str) -> Wanted:
    """`equal` is empty, else `<node>=<part>` or `<node>:<local rank>=<part>`, with commas. Raises ValueError."""
    if text == "equal":
        return {}
    wanted: dict[tuple[str, int | None], int] = {}
    for item in text.split(","):
        name, equals, part = item.partition("=")
        node, colon, local_rank = name.strip().partition(":")
        if not (node and equals and part.isdecimal() and (local_rank.isdecimal() or not colon) and len(part) < 10):
            raise ValueError(f"{item!r}: expected equal, or parts like v100=5,a2000=2 or a16:0=1,a16:1=3")
        key = (node, int(local_rank) if colon else None)
        if key in wanted:
            raise ValueError(f"{name.strip()} is given twice")
        wanted[key] = int(part)
    if not any(wanted.values()):
        raise ValueError("all parts are 0: one rank at least has to take samples")
    return wanted


def choose_shares(wanted: Wanted, ranks: Sequence[tuple[str, int]], batch: int) -> tuple[int, ...]:
    """Whole samples for each rank, equal or in the wanted proportion. A rank's own word goes before its node's.

    ranks: (node, local rank) of each. Raises ValueError where a rank is not spoken of, or a name is no rank's.
    """
    if not wanted:
        return equal_shares(batch, len(ranks))
    known = {key for node, local_rank in ranks for key in ((node, local_rank), (node, None))}
    for node, local_rank in wanted:
        if (node, local_rank) not in known:
            raise ValueError(
                f"{node if local_rank is None else f'{node}:{local_rank}'} takes no part; "
                f"there are {', '.join(f'{n}:{r}' for n, r in ranks)}"
            )
    parts = []
    for node, local_rank in ranks:
        part = wanted.get((node, local_rank), wanted.get((node, None)))
        if part is None:
            raise ValueError(f"nothing is said of {node}:{local_rank}; give every rank its part, 0 takes it out")
        parts.append(part)
    if not any(parts):
        raise ValueError("all parts are 0: one rank at least has to take samples")
    return scale_shares(parts, batch)
