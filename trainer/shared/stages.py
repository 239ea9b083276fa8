"""Where a network is cut for a pipeline: which host holds which of its blocks. Imports no torch.

>>> pipelines = parse_stages("v100:0-31,a2000:32-51")
>>> pipelines[0][1]
Stage(node='a2000', first=32, last=51)
>>> format_stages(pipelines)
'v100:0-31,a2000:32-51'
>>> check_stages(parse_stages("v100:0-31,a2000:32-50"), blocks=52)
Traceback (most recent call last):
ValueError: block 51 is in no stage of 'v100:0-31,a2000:32-50'; each of the 52 blocks is in one, in their order

Several pipelines beside each other, which take parts of each batch, have a `|` between them. The ranks of a host may
hold a stage each:

>>> parse_stages("a16:0:0-12,a16:1:13-28,a2000:29-51")[0][1]
Stage(node='a16:1', first=13, last=28)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_STAGE = re.compile(r"([^:,|=\s]+(?::\d{1,6})?):(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True)
class Stage:
    """A host, or one rank of it (`a16:0`), and the blocks of the network that it holds: `first` to `last`, both
    included. All ranks of a host share its stage.
    """

    node: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.node}:{self.first}-{self.last}"


ALONE = "fidelity=local: a single pipeline has none to average with; cut several (with a | between them), or use exact"
Pipelines = tuple[tuple[Stage, ...], ...]
"""The stages of each pipeline, in the order in which samples pass them."""


def parse_stages(text: str) -> Pipelines:
    """Empty for an empty text. Raises ValueError."""
    if not text:
        return ()
    pipelines = tuple(tuple(_stage(item) for item in one.split(",")) for one in text.split("|"))
    nodes = [stage.node for stages in pipelines for stage in stages]
    if twice := next((node for node in nodes if nodes.count(node) > 1), None):
        raise ValueError(f"{twice!r} holds two stages of {text!r}: a host, or a rank of it, holds one")
    for stages in pipelines:
        _check_order(stages, text)
    return pipelines


def _stage(item: str) -> Stage:
    match = _STAGE.fullmatch(item.strip())
    if not match:
        raise ValueError(f"{item!r}: expected a host and its blocks, like v100:0-31,a2000:32-51")
    node, first, last = match[1], int(match[2]), int(match[3] or match[2])
    if last < first:
        raise ValueError(f"{item!r}: the blocks end before they begin")
    return Stage(node, first, last)


def _check_order(stages: Sequence[Stage], text: str) -> None:
    expected = 0
    for stage in stages:
        if stage.first > expected:
            raise ValueError(f"block {expected} is in no stage of {text!r}; each block is in one, in their order")
        if stage.first < expected:
            raise ValueError(f"block {stage.first} is in two stages of {text!r}; each block is in one, in their order")
        expected = stage.last + 1


def stage_names(nodes: Sequence[str]) -> list[str]:
    """What `stages` calls each rank's host; where all ranks are on one host, each rank by its number.

    >>> stage_names(["v100", "a16", "a16"]), stage_names(["a16", "a16"])
    (['v100', 'a16', 'a16'], ['0', '1'])
    """
    return list(nodes) if len(set(nodes)) > 1 else [str(rank) for rank in range(len(nodes))]


def ranks_of(name: str, nodes: Sequence[str]) -> tuple[int, ...]:
    """Those that a stage with this name has. nodes: each rank's host.

    >>> nodes = ["a16", "a16", "a2000"]
    >>> ranks_of("a16", nodes), ranks_of("a16:1", nodes), ranks_of("v100", nodes)
    ((0, 1), (1,), ())
    """
    of_host = tuple(rank for rank, known in enumerate(stage_names(nodes)) if known == name)
    host, _, number = name.rpartition(":")
    single = [rank for rank, known in enumerate(nodes) if known == host]
    return of_host or tuple(single[int(number) :][:1] if host and number.isdecimal() else ())


def check_stages(pipelines: Pipelines, blocks: int) -> None:
    """Raises ValueError where a pipeline does not end with the last of so many blocks."""
    for stages in pipelines:
        last = stages[-1].last
        if last != blocks - 1:
            what = f"block {last + 1} is in no stage" if last < blocks - 1 else f"there is no block {last}"
            whole = format_stages(pipelines)
            raise ValueError(f"{what} of {whole!r}; each of the {blocks} blocks is in one, in their order")


def format_stages(pipelines: Pipelines) -> str:
    return "|".join(",".join(map(str, stages)) for stages in pipelines)
