"""Ranks of `python -m trainer` as torchrun would start them, forked where torch is there already (`forks`).

with started(folder, ["--exp", "mnist_lenet", ...], world_size=2) as ranks:
    said = [rank.communicate(timeout=60) for rank in ranks]
events = records(folder, 0)
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import forks
from tests.support.forks import Forked
from tests.support.free_port import free_port

ROOT = Path(__file__).parents[2]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Records in `folder`, one thread, and a network in which nothing answers."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    dead = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    return {**kept, **dead, "ORCH_METRICS": f"{folder}/{{rank}}.jsonl", "OMP_NUM_THREADS": "1", **more}


@contextlib.contextmanager
def started(
    folder: Path, arguments: Sequence[str], world_size: int = 1, of_ranks: Sequence[Mapping[str, str]] = ()
) -> Iterator[list[Forked]]:
    """One process a rank, each on a host of its own by name; killed at the end. of_ranks: further variables of each."""
    port = str(free_port())
    ranks: list[Forked] = []
    try:
        for rank in range(world_size):
            info = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ORCH_NODE": f"node{rank}"}
            more = of_ranks[rank] if of_ranks else {}
            variables = {**{name: str(value) for name, value in info.items()}, **place, **more}
            env = environment(folder, **variables)
            ranks.append(forks.start(forks.TRAINER, arguments, cwd=ROOT, env=env))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.__exit__()


def trained(folder: Path, arguments: Sequence[str], world_size: int = 1, **options: Any) -> list[list[dict[str, Any]]]:
    """The records of each rank, of a run that succeeds and complains of nothing."""
    with started(folder, arguments, world_size, **options) as ranks:
        said = [rank.communicate(timeout=120) for rank in ranks]
        assert [(rank.returncode, errors) for rank, (_, errors) in zip(ranks, said, strict=True)] == [
            (0, "")
        ] * world_size, said
    return [records(folder, rank) for rank in range(world_size)]


def records(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Whole lines only: the writer may be at work."""
    path = folder / f"{rank}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def of_event(lines: Sequence[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == event]


def real_mnist() -> Path | None:
    """The folder that holds MNIST/raw, where there is one: ORCH_TEST_MNIST names it."""
    folder = Path(os.environ.get("ORCH_TEST_MNIST", ROOT.parent / "shared" / "data" / "mnist"))
    return folder if (folder / "MNIST" / "raw").is_dir() else None
