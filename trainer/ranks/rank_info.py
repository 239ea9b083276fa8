"""A rank's identity, from torchrun's variables, or else Slurm's, and ORCH_NODE, ORCH_METRICS and ORCH_PACED.

Without such variables the process is rank 0 of 1.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from trainer.ranks.slurm import ranks_variables
from trainer.shared.errors import TrainError
from trainer.shared.pace import Pace, read_pace


@dataclass(frozen=True)
class RankInfo:
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    host: str
    node: str
    metrics_path: Path | None
    master: str | None
    """"address:port" of the rendezvous; None without a launcher."""
    pace: Pace | None = None
    """Set if this rank simulates a GPU."""

    @property
    def learns(self) -> bool:
        """Whether it computes with real data."""
        return self.pace is None or bool(self.pace.like)


def read_rank_info(environment: MutableMapping[str, str] = os.environ) -> RankInfo:
    """Adds torchrun's variables for a task of Slurm. Raises TrainError for an invalid or missing variable."""
    environment.update(ranks_variables(environment))
    world_size = _number(environment, "WORLD_SIZE", 1)
    rank = _number(environment, "RANK", 0)
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if world_size > 1 and not (address and port):
        raise TrainError(f"WORLD_SIZE is {world_size} but MASTER_ADDR or MASTER_PORT is not set: start with torchrun")
    host = socket.gethostname()
    metrics = environment.get("ORCH_METRICS", "")
    return RankInfo(
        rank=rank,
        local_rank=_number(environment, "LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", 1),
        host=host,
        node=environment.get("ORCH_NODE") or host,
        metrics_path=Path(metrics.replace("{rank}", str(rank))) if metrics else None,
        master=f"{address}:{port}" if address and port and "RANK" in environment else None,
        pace=read_pace(environment["ORCH_PACED"]) if environment.get("ORCH_PACED") else None,
    )


def _number(environment: MutableMapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise TrainError(f"{name} is {text!r}, not a number: start with torchrun, which sets it")
    return int(text)
