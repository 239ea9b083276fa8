"""A bottleneck made on purpose, to see that the figures find it. Imports no torch.

>>> parse_slow("rank:1,at:sync,ms:50")
Slow(rank=1, at='sync', ms=50.0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PLACES = ("start", "backward", "sync", "call")


@dataclass(frozen=True)
class Slow:
    """Rank `rank` stands still for `ms` in every step: before forward (start), as backward begins (backward), or when
    its last gradient is ready and not yet handed over (sync); or before every call of a collective that takes part in
    the exchange of gradients or weights (call): once a parameter with allreduce, once a bucket with ddp.
    """

    rank: int
    at: str
    ms: float


def parse_slow(text: str) -> Slow | None:
    """None for an empty text. Raises ValueError saying the form expected."""
    if not text:
        return None
    expected = f"expected rank:R,at:{'|'.join(PLACES)},ms:M, like rank:1,at:start,ms:50"
    parts = dict(part.partition(":")[::2] for part in text.split(","))
    if set(parts) != {"rank", "at", "ms"} or text.count(",") != 2 or parts["at"] not in PLACES:
        raise ValueError(f"{text!r}: {expected}")
    try:
        slow = Slow(rank=int(parts["rank"]), at=parts["at"], ms=float(parts["ms"]))
    except ValueError:
        raise ValueError(f"{text!r}: {expected}") from None
    if slow.rank < 0 or not math.isfinite(slow.ms) or not 0 < slow.ms <= 3_600_000:
        raise ValueError(f"{text!r}: the rank counts from 0, and 0 < ms <= 3600000")
    return slow
