"""What the ranks of `tests/bench/stalls.py` run: a loop that exchanges, and at one step goes wrong or is slow.

python stalling.py KIND VICTIM STEP FOLDER      a step takes a tenth of a second
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

kind, victim, fault_step, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
STEP_S, BATCH = 0.1, 4
SLOW_S = 150.0
"""So long a healthy one is slow."""
disk = f"{folder}/disk-{os.uname().nodename}"


def say(words: str) -> None:
    print(words, flush=True)


def now() -> None:
    say("fault now")


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        if kind == "loader" and rank == victim and index == BATCH * fault_step:
            self.read_from_afar()
        return torch.ones(8)

    def read_from_afar(self) -> None:
        read, _ = os.pipe()
        now()
        os.read(read, 1)  # LINE loader


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def waits_elsewhere() -> None:
    now()
    time.sleep(3600.0)  # LINE missed-elsewhere


def waits_for_a_file() -> None:
    """That nobody writes."""
    now()
    while not os.path.exists(f"{folder}/flag"):
        time.sleep(1.0)  # LINE missed-file


def deadlocks() -> None:
    one, two, ready = threading.Lock(), threading.Lock(), threading.Event()

    def other() -> None:
        with two:
            ready.set()
            with one:
                pass

    with one:
        threading.Thread(target=other, daemon=True).start()
        ready.wait()
        now()
        with two:  # LINE deadlock
            pass


def writes_to_the_disk() -> None:
    """Until it freezes, which is the benchmark's to do."""
    with open(f"{disk}/weights", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
            time.sleep(0.02)


def prints_into_a_pipe() -> None:
    """To a program that has stopped to read."""
    reader = subprocess.Popen(["sleep", "100000"], stdin=subprocess.PIPE)
    now()
    assert reader.stdin
    os.dup2(reader.stdin.fileno(), 1)
    while True:
        os.write(1, b"progress\n" * 1000)  # LINE full-pipe-own


def floods() -> None:
    """Its output, which nobody takes once the benchmark has stopped who reads it."""
    while True:
        os.write(1, b"progress " * 100 + b"\n")  # LINE full-pipe-wrapper
        time.sleep(0.02)


# ---- what is slow and healthy ---------------------------------------------------------------------------------------


def computes(until_s: float) -> None:
    """A fifth of the time, so that several of these fit on a small machine."""
    while time.monotonic() < until_s:
        (torch.rand(300, 300) @ torch.rand(300, 300)).sum().item()
        time.sleep(0.02)


def evaluates() -> None:
    computes(time.monotonic() + SLOW_S)


def compiles() -> None:
    """In another program, as inductor has it done."""
    text = (
        f"import time\nend = time.monotonic() + {SLOW_S}\n"
        "while time.monotonic() < end: sum(range(10**5)); time.sleep(.02)"
    )
    subprocess.run([sys.executable, "-S", "-c", text], check=True)


def unpacks() -> None:
    """In another program, slowly: 40 KiB every 0.2 s."""
    text = (
        f"import time\nend = time.monotonic() + {SLOW_S}\nfile = open({disk + '/data'!r}, 'wb', buffering=0)\n"
        "while time.monotonic() < end: file.write(bytes(40960)); file.seek(0); time.sleep(.2)"
    )
    subprocess.run([sys.executable, "-S", "-c", text], check=True)


def saves() -> None:
    """To a slow disk: each piece is on it before the next."""
    end = time.monotonic() + SLOW_S
    with open(f"{disk}/checkpoint", "wb", buffering=0) as file:
        while time.monotonic() < end:
            file.write(bytes(20480))
            os.fsync(file.fileno())
            file.seek(0)
            time.sleep(0.1)


def sends_much() -> None:
    """All ranks at once; the benchmark has made the link slow: what this takes is 16 MB at 1 Mbit/s."""
    dist.all_reduce(torch.ones(4_000_000))


def steps_long() -> None:
    """All ranks at once, ten minutes' step cut short."""
    computes(time.monotonic() + SLOW_S)


HERE = {
    "missed-elsewhere": waits_elsewhere,
    "missed-file": waits_for_a_file,
    "deadlock": deadlocks,
    "dead-mount": writes_to_the_disk,
    "full-pipe-own": prints_into_a_pipe,
    "full-pipe-wrapper": floods,
    "healthy-evaluation": evaluates,
    "healthy-compile": compiles,
    "healthy-unpack": unpacks,
    "healthy-checkpoint": saves,
}
"""On the victim alone."""
EVERYWHERE = {"healthy-slow-link": sends_much, "healthy-long-step": steps_long}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gradients = torch.ones(100_000)
    for step, _ in enumerate(DataLoader(Samples(), BATCH, num_workers=1)):
        time.sleep(STEP_S)
        if step % 5 == 0 and rank == 0:
            say(f"step {step}")
        if step == fault_step:
            if rank == victim:
                say("reached the step")
                HERE.get(kind, lambda: None)()
            EVERYWHERE.get(kind, lambda: None)()
        dist.all_reduce(gradients)  # LINE exchange
        if kind.startswith("healthy") and step == fault_step:
            say("slow part is over")
            os._exit(0)
