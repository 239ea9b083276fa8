"""All ranks of one machine without torchrun: `python -m trainer --spawn 2 --exp mnist_lenet`.

    return spawn(2, settings)               the exit code to end with

One process a rank (torch.multiprocessing), forked from this one, which has imported torch by then: that takes seconds a
process, and touches no GPU. The first that ends badly ends all, its error is the one a person sees, its exit code that
of the whole. They meet at a store that this process keeps from the moment its port is chosen, so that nobody else can
take that port in between.
"""

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
    """Runs so many ranks and waits for them; a SIGINT or SIGTERM is passed on to them."""
    processes = multiprocessing.get_context("fork")
    ports, speaker = processes.SimpleQueue(), processes.Lock()
    heard: list[int] = []
    arguments = (count, ports, settings, speaker)
    ranks = multiprocessing.start_processes(_be_rank, arguments, count, join=False, start_method="fork")
    store = dist.TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)  # its thread would not survive a fork
    for _ in range(count):
        ports.put(store.port)

    def pass_on(signum: int, frame: FrameType | None) -> None:
        heard.append(signum)
        for process in ranks.processes:
            if process.is_alive():
                os.kill(process.pid, signum)

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it would report whom it ends
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
    """A process of its own counts: torch may ask CUDA, and who has asked CUDA can fork no rank that uses a GPU."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(torch.cuda.device_count).result()


def _wait(ranks: Any) -> multiprocessing.ProcessExitedException | None:
    """Until all have ended: None, or how the first ended that did so badly; the others it then ends (SIGTERM)."""
    try:
        while not ranks.join():
            continue
    except multiprocessing.ProcessExitedException as failure:
        return failure
    return None


def _be_rank(rank: int, count: int, ports: Any, settings: AnySettings, speaker: Any) -> None:
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    # torch's own words for a store that somebody else keeps: what torchrun's agent gives its workers.
    store = {"MASTER_ADDR": _ADDRESS, "MASTER_PORT": ports.get(), "TORCHELASTIC_USE_AGENT_STORE": True}
    store |= {"TORCHELASTIC_RUN_ID": "spawn", "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in {**who, **store}.items()})
    sys.exit(run(settings, may_complain=lambda: speaker.acquire(block=False)))
