"""A command that starts all ranks of its host by itself, as a person types it: one wrapper stands for all of them.

It sees nothing of the torchrun that started the wrapper. Its ranks write their metrics each into its own folder; what
they print is the command's, and stands in the first rank's logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .layout import JobFolder

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_")


def ranks_of(node: Mapping[str, Any], local_rank: int) -> list[int]:
    """The global numbers of the ranks that a wrapper stands for."""
    numbers = [int(number) for number in node["rank_numbers"]]
    return numbers if node.get("starts_ranks") else [numbers[local_rank]]


def make_folders(job: JobFolder, others: list[int]) -> None:
    """Those of the ranks behind the first one, which print nothing of their own."""
    for rank in others:
        job.rank(rank).mkdir(exist_ok=True)
        for log in ("stdout.log", "stderr.log"):
            (job.rank(rank) / log).touch(mode=0o600)


def without_torchrun(environment: Mapping[str, str], job: JobFolder) -> dict[str, str]:
    """What the command shall have; the trainer puts each rank's number for `{rank}`."""
    kept = {name: value for name, value in environment.items() if not _is_torchruns(name)}
    return {**kept, "ORCH_METRICS": f"{job.root}/rank-{{rank}}/metrics.jsonl"}


def _is_torchruns(name: str) -> bool:
    return name in _OF_TORCHRUN or name.startswith(_PREFIXES)
