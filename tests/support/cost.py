"""Measures of work that do not depend on a machine's speed or load: growth of time, and number of calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def growth(small: Callable[[], object], large: Callable[[], object], tries: int = 3) -> float:
    """CPU time of `large` in multiples of that of `small`: the shortest of several tries of each."""
    times_s = [(_cpu_s(small), _cpu_s(large)) for _ in range(tries)]
    shortest_small_s, shortest_large_s = map(min, zip(*times_s, strict=True))
    return shortest_large_s / shortest_small_s


def _cpu_s(work: Callable[[], object]) -> float:
    before_s = time.process_time()
    work()
    return time.process_time() - before_s


@contextmanager
def at_most_calls(most: int) -> Iterator[None]:
    """Fails as soon as the block has called more functions of Python and C than this."""
    count = 0

    def counted(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")
        assert count <= most, f"more than {most:,} calls"

    sys.setprofile(counted)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert count <= most, f"more than {most:,} calls"
