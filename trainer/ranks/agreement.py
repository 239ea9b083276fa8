"""What ranks report to each other: a line of each, numbers added up, and one failure for all.

    with together(info.node):              # raises on every rank what any rank raised, the same line
        open_data(settings)
    loss, samples = sum_over_ranks([12.5, 32.0])

All of it goes over Gloo between CPUs, whatever carries the gradients: it needs no GPU and waits for none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from trainer.shared.errors import TrainError

_LINE_BYTES = 1000


@contextlib.contextmanager
def together(node: str) -> Iterator[None]:
    """Waits for every rank at its end; a TrainError of one rank is raised on every rank, the lowest rank's first.

    node: put before the line, since the others cannot know on which host it failed.
    """
    own = ""
    try:
        yield
    except TrainError as error:
        own = f"{node}: {error}"
    for line in gather_lines(own):
        if line:
            raise TrainError(line)


def gather_lines(own: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Each rank's line, in the order of ranks; what goes beyond 1,000 bytes is cut off."""
    mine = torch.tensor(list(own.encode()[:_LINE_BYTES].ljust(_LINE_BYTES, b"\0")), dtype=torch.uint8)
    lines = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lines, mine, group=group)
    return [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in lines]


def agreed(values: list[float], how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None) -> list[float]:
    """The least, largest or sum over all ranks, value by value, in double precision."""
    if dist.get_world_size(group) == 1:
        return [float(value) for value in values]
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=how, group=group)
    return [float(value) for value in tensor.tolist()]


def sum_over_ranks(values: list[float]) -> list[float]:
    return agreed(values, dist.ReduceOp.SUM)


def differing(number: int, name: str, group: dist.ProcessGroup) -> str:
    """What ranks of a group are at, if it is not the same on all, judged by its number: `name, name`. Called by all of
    them; if the group is not of Gloo, it is one of all ranks.
    """
    among = group if dist.get_backend(group) == "gloo" else None
    highest, lowest = agreed([number, -number], dist.ReduceOp.MAX, among)
    return "" if highest == -lowest else ", ".join(dict.fromkeys(gather_lines(name, among)))
