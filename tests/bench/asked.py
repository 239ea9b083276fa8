"""What it costs a script that it can be asked where it stands (`orch why`), and that it is asked.

    nice -n -15 .venv/bin/python tests/bench/asked.py

One process alone, with DistributedDataParallel over Gloo, as in `watched.py`. Steps of three kinds take turns: without
Python's handler for SIGURG, with it, and, every fifth time, with it while another process asks. Compared is the
processor time of the thread that trains: the ratio of medians, and the mean difference of the pairs with its 95 %
interval. `orch` asks a rank twice in each look, and without a person once for a standstill: here that is reckoned as
once a minute, standstill or not. Exits 1 where either costs more than 0.5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from rack import end_orderly_on_term, show_machine
from watched import LIMIT, WARMUP, convolutions, interval, middle, transformer

from orchestrator.remote.script_start import open_stacks

LOOKS = 2
"""Of one `orch why`."""
MINUTE_S = 60.0
ASK_EVERY = 5
ASKS = """
import sys
from pathlib import Path
from orchestrator.remote.stacks import asking
for line in sys.stdin:
    with asking(Path(sys.argv[1])) as ask:
        found = ask(int(sys.argv[2]))
    print(len(found or ()), flush=True)
"""
KINDS = ("without", "registered", "asked")


class Asker:
    """Another process, which asks this one when it is told to."""

    def __init__(self, stacks: str) -> None:
        words = [sys.executable, "-c", ASKS, stacks, str(os.getpid())]
        pipe, root = subprocess.PIPE, Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, cwd=root)
        self._handle = next(int(fd) for fd in os.listdir("/proc/self/fd") if _is(stacks, fd))

    def step_s(self, kind: str, loop: Iterator[None]) -> float:
        """Processor time of one step of this kind."""
        assert self._process.stdin and self._process.stdout
        if kind != "without":
            faulthandler.register(signal.SIGURG, self._handle, all_threads=False)
        if kind == "asked":
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        began = time.thread_time()
        next(loop)
        if kind == "asked" and not int(self._process.stdout.readline()):  # it may be asked after its step: it counts
            raise RuntimeError("it did not answer")
        took_s = time.thread_time() - began
        if kind != "without":
            faulthandler.unregister(signal.SIGURG)
        return took_s

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def _is(path: str, handle: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(f"/proc/self/fd/{handle}", path)
    return False


def compare(name: str, loop: Iterator[None], asker: Asker, turns: int) -> bool:
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(WARMUP + turns):
        for kind in KINDS[:2] if turn % 2 else KINDS[1::-1]:
            step_s = asker.step_s(kind, loop)
            if turn >= WARMUP:
                took[kind].append(step_s)
        if turn >= WARMUP and turn % ASK_EVERY == 0:
            took["asked"].append(asker.step_s("asked", loop))
            next(loop)  # it has waited for the answer: the step after that finds cold caches, and counts for nobody
    bare_s = statistics.median(took["without"])
    pairs = [a - b for a, b in zip(took["registered"], took["without"], strict=True)]
    ratio, (low, high) = statistics.median(took["registered"]) / bare_s - 1, (each / bare_s for each in interval(pairs))
    ask_s = statistics.median(took["asked"]) - bare_s
    part = LOOKS * ask_s / MINUTE_S
    print(f"{name}, {turns} pairs of steps of {1000 * bare_s:.1f} ms: registered {ratio:+.2%} by medians, "
          f"{middle(pairs) / bare_s:+.2%} ({low:+.2%} to {high:+.2%}) by pairs; to be asked once takes "
          f"{1e3 * ask_s:+.2f} ms by medians, twice a minute {part:+.4%}", flush=True)  # fmt: skip
    return low <= LIMIT and part <= LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description="What it costs a script to be asked where it stands.")
    parser.add_argument("--turns", type=int, default=200)
    turns = parser.parse_args().turns
    end_orderly_on_term()
    show_machine()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        stacks = f"{folder}/stacks"
        open_stacks(stacks)
        asker = Asker(stacks)
        try:
            good = [compare(loop.__name__, loop(), asker, turns) for loop in (transformer, convolutions)]
        finally:
            asker.end()
    dist.destroy_process_group()
    return 0 if all(good) else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
