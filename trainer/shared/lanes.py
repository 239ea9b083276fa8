"""Micro-batches over the ranks of one stage, its lanes: the rule that ranks and forecasts follow. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """A micro-batch's. size: its samples. lanes: the one that takes it, in each stage."""

    size: int
    lanes: tuple[int, ...]


def routes(sizes: Sequence[Sequence[int]], later: Sequence[int]) -> tuple[Route, ...]:
    """An update's micro-batches, in the order in which every stage takes them.

    sizes: of those that each lane of the first stage reads. later: the number of lanes of each stage behind it.

    >>> [route.lanes for route in routes([(8, 8), (8,)], later=[2])]
    [(0, 0), (1, 1), (0, 0)]
    """
    order = interleaved([len(of_lane) for of_lane in sizes])
    left = [iter(of_lane) for of_lane in sizes]
    behind = [interleaved(even(len(order), lanes)) for lanes in later]
    return tuple(Route(next(left[lane]), (lane, *(of[number] for of in behind))) for number, lane in enumerate(order))


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
