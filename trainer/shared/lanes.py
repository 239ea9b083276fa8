"""Micro-batches over the ranks of one stage, its lanes: the rule that ranks and forecasts follow. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence


def even(count: int, lanes: int) -> list[int]:
    """So many micro-batches over so many lanes."""
    return [count // lanes + (lane < count % lanes) for lane in range(lanes)]


def interleaved(counts: Sequence[int]) -> list[int]:
    """Lanes, each as often as it has micro-batches, as evenly mixed as that goes.

    >>> interleaved([4, 2])
    [0, 1, 0, 0, 1, 0]
    """
    turns = [((2 * turn + 1) / (2 * count), lane) for lane, count in enumerate(counts) for turn in range(count)]
    return [lane for _, lane in sorted(turns)]
