"""Writes a synthetic collected run folder, as `orch collect` would leave it.

    run = write_run(tmp_path, [Host("a2000", ranks=1), Host("v100", ranks=2)], metrics={0: lines_of_rank_0, ...})

Also a ready example, hand-computed in test_analyse.py: `two_hosts`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.paths import RunFolder
from orchestrator.results.analyse import analyse

SETTINGS = {
    "strategy": "allreduce",
    "batch": 96,
    "model": "lenet",
    "data": "mnist",
    "num_workers": 2,
    "warmup_steps": 3,
}


@dataclass(frozen=True)
class Host:
    name: str
    ranks: int = 1
    gpu: str | None = "RTX A2000"
    paced: bool = False


def start(**fields: Any) -> dict[str, Any]:
    values = {
        "event": "start",
        "schema": 1,
        "host": "gpu-box",
        "device": "cuda:0",
        "device_name": "NVIDIA RTX A2000",
        "torch": "2.0.1",
        "nccl": "2.14.3",
        "backend": "nccl",
        "model": "lenet",
        "parameters": 61706,
        "gradient_bytes": 246824,
        "batch_per_rank": 32,
        "settings": {"warmup_steps": 3},
    }
    return values | fields


def step(number: int, samples: int, load: float, compute: float, exposed: float, optim: float, **fields: Any) -> Any:
    """A step line whose total is the sum of its parts; its samples' losses sum to 0.5 a sample."""
    values = {
        "event": "step",
        "step": number,
        "epoch": 0,
        "samples": samples,
        "t_ms": load + compute + exposed + optim,
        "load_ms": load,
        "compute_ms": compute,
        "exposed_ms": exposed,
        "optim_ms": optim,
        "loss": 0.5 * samples,
        "wall": 1.8e9 + number,
    }
    return values | fields


def end(peak_memory_bytes: int = 2**30, **fields: Any) -> dict[str, Any]:
    return {
        "event": "end",
        "status": "succeeded",
        "message": None,
        "total_s": 9.5,
        "peak_memory_bytes": peak_memory_bytes,
    } | fields


def lines(events: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def write_run(
    root: Path,
    hosts: Sequence[Host],
    metrics: Mapping[int, bytes | Iterable[Any]],
    *,
    exp: str = "mnist_lenet",
    kind: str = "experiment",
    settings: Mapping[str, Any] | None = None,
    state: str = "succeeded",
    first_failure: Mapping[str, Any] | None = None,
    gpu: Mapping[str, bytes | Iterable[Any]] | None = None,
) -> RunFolder:
    """metrics: by rank, gpu: by node; events, or the very bytes of the file. A rank or node not named has no file."""
    run = RunFolder(root)
    root.mkdir(parents=True, exist_ok=True)
    chosen = dict(SETTINGS if settings is None else settings)
    plan = _plan(hosts, exp, kind, chosen)
    run.plan.write_text(json.dumps(plan))
    job = {
        "schema": 1,
        "id": plan["job"],
        "state": state,
        "exp": exp,
        "cluster": "a2000-v100",
        "nodes": [host.name for host in hosts],
        "started": "2026-11-21T09:12:00Z",
        "ended": "2026-11-21T09:20:00Z",
        "exit_code": 0 if state == "succeeded" else 1,
        "first_failure": first_failure,
    }
    run.job.write_text(json.dumps(job))
    for node in plan["nodes"]:
        for rank in range(node["first_rank"], node["first_rank"] + node["ranks"]):
            path = run.metrics(node["name"], rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            if rank in metrics:
                given = metrics[rank]
                path.write_bytes(given if isinstance(given, bytes) else lines(given))
    for name, given in (gpu or {}).items():
        run.gpu(name).write_bytes(given if isinstance(given, bytes) else lines(given))
    return run


def _plan(hosts: Sequence[Host], exp: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    nodes, first_rank = [], 0
    for number, host in enumerate(hosts):
        node = {
            "name": host.name,
            "node_rank": number,
            "first_rank": first_rank,
            "ranks": host.ranks,
            "address": f"192.168.1.{41 + number}",
            "interface": "eth0",
            "device": "cuda" if host.gpu else "cpu",
            "gpu": host.gpu,
            "bandwidth_bps": 2.5e9,
            "paced": {"samples_per_s": 333} if host.paced else None,
            "python": "/usr/bin/python3",
            "workdir": "~/.orch",
            "torchrun": ["-m", "torch.distributed.run"],
            "command": ["-m", "trainer"],
        }
        nodes.append(node)
        first_rank += host.ranks
    return {
        "schema": 1,
        "job": f"{exp}-20261121-0912-k3f",
        "exp": exp,
        "kind": kind,
        "cluster": "a2000-v100",
        "settings": settings,
        "master": hosts[0].name,
        "master_address": "192.168.1.41",
        "rendezvous_port": 29500,
        "world_size": first_rank,
        "created": "2026-11-21T09:11:58Z",
        "code": {"sha256": "0" * 64, "source": "trainer", "files": 20, "size_bytes": 60000},
        "nodes": nodes,
    }


def two_hosts(root: Path, **options: Any) -> RunFolder:
    """A2000 with one rank, V100 with two; 3 warm-up steps (step 0 absurdly slow), then 4 measured ones of 100 ms.

    Rank 0 (a2000): 16 samples, load 2, compute 80, exposed 10, optim 8.
    Ranks 1, 2 (v100): 40 samples each, load 2, compute 40, exposed 50, optim 8.
    """
    hosts = [Host("a2000", 1, "RTX A2000"), Host("v100", 2, "Tesla V100-16GB")]
    slow_start = step(0, 16, 2, 8000, 10, 8), step(0, 40, 2, 40, 7970, 8)
    slow = [slow_start[0]] + [step(number, 16, 2, 80, 10, 8) for number in range(1, 7)]
    fast = [slow_start[1]] + [step(number, 40, 2, 40, 50, 8) for number in range(1, 7)]
    evaluation = {"event": "eval", "epoch": 0, "step": 6, "samples": 10000, "accuracy": 0.9923, "loss": 0.03}
    evaluation |= {"per_class": [0.99, 0.995, None], "eval_s": 1.0}
    v100 = {"host": "v100-box", "device_name": "Tesla V100-PCIE-16GB", "batch_per_rank": 40}
    metrics = {
        0: [start(rank=0, batch_per_rank=16), *slow, evaluation, end(3 * 2**30)],
        1: [start(rank=1, **v100), *fast, evaluation, end(5 * 2**30)],
        2: [start(rank=2, **v100), *fast, evaluation, end(6 * 2**30)],
    }
    return write_run(root, hosts, metrics, **options)


def steady_run(root: Path, compute_ms: float, *, seed: int = 0, accuracy: float = 0.97, **settings: Any) -> RunFolder:
    """Analysed: two hosts, 96 samples a step, 3 steps of warm-up and 60 measured ones that vary by 2 %, one evaluation.

    A step takes 12 ms beside its compute time.
    """
    draw = random.Random(seed)
    ranks: dict[int, list[Any]] = {rank: [start(rank=rank, batch_per_rank=48)] for rank in (0, 1)}
    for number in range(63):
        now_ms = compute_ms * (1 + 0.02 * draw.gauss(0, 1))
        for events in ranks.values():
            events.append(step(number, 48, 1, now_ms, 10, 1))
    evaluation = {"event": "eval", "epoch": 0, "step": 62, "samples": 100, "accuracy": accuracy, "loss": 0.1}
    for events in ranks.values():
        events += [evaluation, end()]
    run = write_run(root, [Host("a2000"), Host("v100", gpu="Tesla V100-16GB")], ranks, settings=SETTINGS | settings)
    analyse(run)
    return run
