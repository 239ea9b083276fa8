"""Small exchanges between ranks over Gloo: text lines, sums, and one failure for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from trainer.shared.errors import TrainError

_LINE_BYTES = 1000


@contextlib.contextmanager
def together(node: str) -> Iterator[None]:
    """Waits for every rank at its end. Raises the lowest rank's TrainError on every rank.

    node: names the host in the message.
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
    """Each rank's line, cut to 1,000 bytes."""
    mine = torch.tensor(list(own.encode()[:_LINE_BYTES].ljust(_LINE_BYTES, b"\0")), dtype=torch.uint8)
    lines = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lines, mine, group=group)
    return [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in lines]


def agreed(values: list[float], how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None) -> list[float]:
    """The minimum, maximum or sum of each value."""
    if dist.get_world_size(group) == 1:
        return [float(value) for value in values]
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=how, group=group)
    return [float(value) for value in tensor.tolist()]


def sum_over_ranks(values: list[float]) -> list[float]:
    return agreed(values, dist.ReduceOp.SUM)


def differing(number: int, name: str, group: dist.ProcessGroup) -> str:
    """The names if the numbers differ, otherwise "". A collective call; without Gloo, `group` has all ranks."""
    among = group if dist.get_backend(group) == "gloo" else None
    highest, lowest = agreed([number, -number], dist.ReduceOp.MAX, among)
    return "" if highest == -lowest else ", ".join(dict.fromkeys(gather_lines(name, among)))
