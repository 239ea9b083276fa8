"""Runs of the trainer and what their records say.

    done = runs.alone("alone-bf16", "--exp", "resnet152_cifar", "--amp", "bf16", limit_s=60)
    done.succeeded, done.median("t_ms"), done.cause
    runs.pair("ddp", "--strategy", "ddp", ..., limit_s=60)          two ranks, see `pair`

Each run's output is NAME.log, its records NAME-RANK.jsonl, in one folder.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import child
from .here import is_stand_in, visible
from .network import GBPS

WARM_UP = 5
"""First steps that are left out of every figure."""
RESNET = ("--exp", "resnet152_cifar", "--data", "synthetic", "--eval_every", "0")
LENET = ("--exp", "mnist_lenet", "--data", "synthetic", "--eval_every", "0")


@dataclass(frozen=True)
class Done:
    """records: of each rank."""

    ended: child.Ended
    records: tuple[tuple[Mapping[str, Any], ...], ...]

    @property
    def succeeded(self) -> bool:
        return self.ended.succeeded

    @property
    def cause(self) -> str:
        messages = [end["message"] for end in self.all("end", rank=None) if end.get("message")]
        return messages[0] if messages and self.ended.exit_code is not None else self.ended.cause

    def all(self, event: str, rank: int | None = 0) -> list[Mapping[str, Any]]:
        """rank None: of all ranks."""
        chosen = self.records if rank is None else self.records[rank : rank + 1]
        return [record for records in chosen for record in records if record.get("event") == event]

    def last(self, event: str) -> Mapping[str, Any]:
        """Rank 0's last one; empty where there is none."""
        found = self.all(event)
        return found[-1] if found else {}

    def steps(self) -> list[Mapping[str, Any]]:
        """Rank 0's, without the warm-up."""
        return self.all("step")[WARM_UP:]

    def median(self, name: str) -> float:
        """Over rank 0's steps. Raises StatisticsError where there are none."""
        return statistics.median(step[name] for step in self.steps())


@dataclass
class Runs:
    """folder: for logs and records. gpus: how many. deadline_s: by time.monotonic, when the part's time is over.
    patience: a run's time limit is so many times what is asked for, on a machine that is given more than 20 minutes.
    """

    folder: Path
    gpus: int
    deadline_s: float = 0.0
    patience: float = 1.0

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    def alone(self, name: str, *arguments: str, limit_s: float, **environment: str) -> Done:
        command = [sys.executable, "-m", "tests.gpu.rank", *arguments]
        return self._run(
            name, command, limit_s, {"ORCH_NODE": "host0", "CUDA_VISIBLE_DEVICES": visible(0), **environment}
        )

    def pair(self, name: str, *arguments: str, limit_s: float, prefix: Sequence[str] = (), **environment: str) -> Done:
        """prefix: what puts the command into a network of its own."""
        command = [*prefix, sys.executable, "-m", "tests.gpu.pair", *arguments]
        gpus = {"GPU_OF_RANKS": ",".join(visible(gpu) for gpu in range(min(2, self.gpus)))}
        return self._run(name, command, limit_s, {**gpus, **_stand_in_link(), **environment})

    def _run(self, name: str, command: Sequence[str], limit_s: float, environment: Mapping[str, str]) -> Done:
        metrics = {"ORCH_METRICS": str(self.folder / f"{name}-{{rank}}.jsonl")}
        limit_s = max(1.0, min(self.patience * limit_s, self.left_s))
        ended = child.run(command, self.folder / f"{name}.log", limit_s, {**metrics, **environment})
        files = [self.folder / f"{name}-{rank}.jsonl" for rank in (0, 1)]
        return Done(ended, tuple(tuple(read_records(file)) for file in files if file.exists()))


def _stand_in_link() -> dict[str, str]:
    """Its NCCL has a link of its own for each rank; on `lo` the bytes of both go through one wire."""
    return {"FAKE_LINK_GBPS": str(GBPS / 2)} if is_stand_in() else {}


def read_records(file: Path) -> list[dict[str, Any]]:
    """Its whole lines; the last one of a run that was ended may be cut."""
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
