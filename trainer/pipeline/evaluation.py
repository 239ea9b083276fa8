"""Data on their way through a pipeline: `for logits, labels in outputs(pipeline, part, batches): ...` on every rank.

Each of the first stage's ranks sends its batches forward, and the ranks of the last stage see what comes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_HEADER = 5
"""A tag: samples of the batch that follows, 0 at the end; and the rank that read them."""
_PASSED = 6
"""Likewise of `pass_on`: where an update has been announced, the other tags are waited for already."""


@dataclass(frozen=True)
class _Batch:
    inputs: Tensor
    labels: Tensor
    reader: int


def outputs(
    of: Any, part: Callable[[Tensor], Any], batches: Iterable[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels on the last stage's ranks, nothing on the others. of: a Pipeline. part: what this rank's stage
    does. batches: of a first stage's rank.
    """
    dtype = next(of.model.parameters()).dtype
    following = of.following
    for batch in _read(of, batches) if of.is_first else _received(of, dtype):
        output: Any = part(batch.inputs)
        if following is None:
            yield output, batch.labels
            continue
        number = torch.tensor([len(of.cuts.check_output(output, len(batch.inputs))), batch.reader])
        dist.send(number, following, group=of.group, tag=_HEADER)
        of.to_next[following].send(output)
    if following is not None:
        dist.send(torch.zeros(2, dtype=torch.int64), following, group=of.group, tag=_HEADER)


def pass_on(of: Any, part: Callable[[Tensor], Any], batches: Iterable[Tensor]) -> None:
    """Images through all stages of a pipeline, between any two updates, for what the stages see of them; on every rank.

    of, part, batches: as of `outputs`.
    """
    following = of.following
    for inputs in (batch.to(of.device) for batch in batches) if of.is_first else _passed(of):
        output: Any = part(inputs)
        if following is not None:
            of.cuts.check_output(output, len(inputs))
            dist.send(torch.tensor([len(output)]), following, group=of.group, tag=_PASSED)
            dist.send(output.cpu().contiguous(), following, group=of.group, tag=_PASSED)
    if following is not None:
        dist.send(torch.zeros(1, dtype=torch.int64), following, group=of.group, tag=_PASSED)


def _passed(of: Any) -> Iterator[Tensor]:
    dtype = next(of.model.parameters()).dtype
    for source in of.preceding:
        while True:
            samples = torch.empty(1, dtype=torch.int64)
            dist.recv(samples, source, group=of.group, tag=_PASSED)
            if not samples:
                break
            inputs = torch.empty((int(samples), *of.cuts.before), dtype=dtype)
            dist.recv(inputs, source, group=of.group, tag=_PASSED)
            yield inputs.to(of.device)


def _read(of: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[_Batch]:
    for images, labels in batches:
        if of.to_last:
            of.to_last[of.judge(of.rank)].send(of.cuts.check_labels(labels, len(images)))
        yield _Batch(images.to(of.device), labels.to(of.device), of.rank)


def _received(of: Any, dtype: torch.dtype) -> Iterator[_Batch]:
    shape = of.cuts.before or ()
    for source in of.preceding:
        while True:
            header = torch.empty(2, dtype=torch.int64)
            dist.recv(header, source, group=of.group, tag=_HEADER)
            samples, reader = header.tolist()
            if not samples:
                break
            of.inputs[source].expect((samples, *shape), dtype)
            labels = torch.empty(0, dtype=torch.int64)
            if of.labels:
                of.labels[reader].expect((samples, *of.cuts.labels.shape), of.cuts.labels.dtype)
                labels = of.labels[reader].wait()
            yield _Batch(of.inputs[source].wait(), labels, reader)
