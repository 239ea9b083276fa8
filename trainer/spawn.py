"""Starts all ranks of one machine without torchrun: `python -m trainer --spawn 2 --exp mnist_lenet`.

Forks after torch is imported, which saves seconds per rank. The first rank that fails ends the others.
"""
# The store opens as soon as its port is chosen, so no other program can take it.

from __future__ import annotations

import logging
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import trainer.train  # noqa: F401 - what the ranks would import, each for itself
from trainer.run_rank import run
from trainer.shared.settings import AnySettings

_ADDRESS = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def spawn(count: int, settings: AnySettings) -> int:
    """Returns the exit code. Forwards SIGINT and SIGTERM to the ranks."""
    processes = multiprocessing.get_context("fork")
    ports, speaker = processes.SimpleQueue(), processes.Lock()
    heard: list[int] = []
    arguments = (count, ports, settings, speaker)
    ranks = multiprocessing.start_processes(_be_rank, arguments, count, join=False, start_method="fork")
    store = dist.TCPStore(
        _ADDRESS, 0, is_master=True, wait_for_workers=False
    )  # created after the fork, which its thread would not survive
    for _ in range(count):
        ports.put(store.port)

    def pass_on(signum: int, frame: FrameType | None) -> None:
        heard.append(signum)
        for process in ranks.processes:
            if process.is_alive():
                os.kill(process.pid, signum)

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it would report each rank that it ends
    for signum in _SIGNALS:
        signal.signal(signum, pass_on)
    failure = _wait(ranks)
    if heard:
        return 128 + heard[0]
    if failure is None:
        return 0
    how = f"was killed by {failure.signal_name}" if failure.signal_name else f"exited {failure.exit_code}"
    sys.stderr.write(f"rank {failure.error_index} {how}; the others were ended\n")
    return int(failure.exit_code if failure.exit_code > 0 else 128 - failure.exit_code)


def gpu_count() -> int:
    """Asks in another process: once torch has asked CUDA, forked ranks cannot use a GPU."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(torch.cuda.device_count).result()


def _wait(ranks: Any) -> multiprocessing.ProcessExitedException | None:
    """Returns the first failure, after which torch ends the other ranks with SIGTERM."""
    try:
        while not ranks.join():
            continue
    except multiprocessing.ProcessExitedException as failure:
        return failure
    return None


def _be_rank(rank: int, count: int, ports: Any, settings: AnySettings, speaker: Any) -> None:
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    # torch's variables for an existing store, as torchrun's agent sets them for its workers.
    store = {"MASTER_ADDR": _ADDRESS, "MASTER_PORT": ports.get(), "TORCHELASTIC_USE_AGENT_STORE": True}
    store |= {"TORCHELASTIC_RUN_ID": "spawn", "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in {**who, **store}.items()})
    sys.exit(run(settings, may_complain=lambda: speaker.acquire(block=False)))
