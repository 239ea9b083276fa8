"""How long a supervisor that is not heard counts as there; and whether we ourselves stood still for so long.

The lease is mutual: who hears nothing for LEASE_S ends its own ranks, and who finds that it stood still for that
long itself (`Pulse`) does nothing more of what it then hears, for the others have gone on without it.
"""

from __future__ import annotations

import time

from .plain_asyncio import asyncio

BEAT_S = 2.0
LEASE_S = 20.0
"""No word for this long, either way, and the other side counts as gone."""
QUIET_S = 6.0
"""After so long without a word a member dials again beside its old connection: after a cut, TCP waits longer and longer
before it tries again, and the wait after a cut of 10 s may well outlast the lease."""
BROKEN_S = 5.0
"""The lease of a member whose connection was closed, and of a hub that refuses one: a live peer is back at once."""


class Pulse:
    """Detects that we ourselves stood still: stopped by a signal, starved, or asleep with the whole machine."""

    def __init__(self) -> None:
        self._last = self._now()
        self._longest_s = 0.0

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._longest_s, self._last = self.longest_s, self._now()

    @property
    def longest_s(self) -> float:
        """The longest time between two beats, the present one included: what wakes first may ask before it beats."""
        return max(self._longest_s, self._now() - self._last)

    @staticmethod
    def _now() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)  # counts a suspended machine's time, too
