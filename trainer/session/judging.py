"""What a script's own judgement of the test data adds up to, over all ranks, each sample once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compute.models import evaluated
from trainer.ranks.agreement import gather_lines, sum_over_ranks

Judge = Callable[[Any, Any], Mapping[str, Tensor | float]]
"""Of outputs and targets: numbers by name, each a SUM over their samples."""


@torch.no_grad()
def summed(network: nn.Module, outputs: Iterable[tuple[Any, Any]], judge: Judge, samples: int) -> dict[str, float]:
    """Each number over all `samples`, by that number of samples. outputs: outputs and targets of what this rank is to
    judge, which may be nothing. Waits for all ranks.
    """
    sums: dict[str, Tensor | float] = {}
    with evaluated(network):
        for output, targets in outputs:
            for name, value in judge(output, targets).items():
                sums[name] = sums.get(name, 0.0) + value
    names = names_of_all(list(sums))
    totals = sum_over_ranks([float(sums.get(name, 0.0)) for name in names]) if names else []
    return {name: total / samples for name, total in zip(names, totals, strict=True)}


def names_of_all(own: list[str]) -> list[str]:
    """Ranks that judge nothing do not know them."""
    return next((json.loads(line) for line in gather_lines(json.dumps(own) if own else "") if line), [])
