"""Who this process is among all ranks, read once from the environment that torchrun and the launcher set.

    RANK=1 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=192.168.1.42 MASTER_PORT=29500    (torchrun)
    ORCH_NODE=a2000 ORCH_METRICS=/home/ubuntu/.orch/jobs/j1/rank-1/metrics.jsonl                      (optional)
    ORCH_PACED={"samples_per_s": 333}                              (optional: stands in for a GPU, see `pace`)

Without torchrun's variables the process is alone: rank 0 of 1. `{rank}` in ORCH_METRICS stands for the rank, for
those who start torchrun by hand.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.shared.errors import TrainError
from trainer.shared.pace import Pace, read_pace


@dataclass(frozen=True)
class RankInfo:
    """Who this rank is, from the launcher's variables."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    host: str
    node: str
    metrics_path: Path | None
    master: str | None
    """"address:port" of the rendezvous; None for a process that nobody launched."""
    pace: Pace | None = None
    """The speed to keep, where this rank stands in for a GPU."""

    @property
    def learns(self) -> bool:
        """Whether it computes with real data."""
        return self.pace is None or bool(self.pace.like)


def read_rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Raises TrainError where a variable is no number or the rendezvous of several ranks is missing."""
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


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise TrainError(f"{name} is {text!r}, not a number: start with torchrun, which sets it")
    return int(text)
