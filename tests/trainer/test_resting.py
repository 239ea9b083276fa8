"""A script's interpreter ends after torch's threads have let go of its callbacks."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from trainer.ranks import ending

SCRIPT = """
import datetime, functools, hashlib, threading
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.distributed as dist
from trainer.session.session import Ending


class SlowToGo:
    # As a thread that the kernel sets aside at the worst moment: it has said that the sum is there, and has not let go
    # of what it called.
    def __call__(self, summed):
        return summed.value()[0]

    def __del__(self):
        assert threading.current_thread() is not threading.main_thread()
        lets_go.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)


ending, lets_go = Ending(), threading.Event()
store = dist.HashStore()
join = functools.partial(dist.ProcessGroupGloo, store, size=2, timeout=datetime.timedelta(seconds=60))
with ThreadPoolExecutor() as pool:  # two ranks in one process, so that each knows when the other takes part
    one, other = pool.map(lambda rank: join(rank=rank), range(2))
summed = one.allreduce([torch.ones(4)]).get_future().then(SlowToGo())
other.allreduce([torch.ones(4)]).wait()
summed.wait()
lets_go.wait()
ending.complete = lambda: None
"""


def test_a_callback_that_is_let_go_late_takes_no_process_down() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nobody_waits_for_threads_that_wait_themselves() -> None:
    waiting = threading.Thread(target=threading.Event().wait, daemon=True)
    waiting.start()
    began_s = time.monotonic()
    ending.wait_for_threads(patience_s=60.0)
    assert time.monotonic() - began_s < 30.0 and waiting.is_alive()


def test_one_that_computes_is_waited_for() -> None:
    computes = ("sha256", b"", b"", 200_000)  # without the interpreter's lock
    thread = threading.Thread(target=hashlib.pbkdf2_hmac, args=computes, daemon=True)
    thread.start()
    ending.wait_for_threads(patience_s=60.0)
    assert not thread.is_alive()


def test_one_that_never_rests_is_not() -> None:
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    began_s = time.process_time()
    ending.wait_for_threads(patience_s=0.1)
    took_s = time.process_time() - began_s
    over.set()
    assert took_s >= 0.1


def test_what_it_may_take_is_time_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others use the machine a thread waits for its turn meanwhile."""
    looks, clock = iter([True] * 1000 + [False] * 3), iter(range(10_000))
    monkeypatch.setattr(ending, "_others_run", lambda: next(looks))
    monkeypatch.setattr(ending, "time", SimpleNamespace(sleep=lambda _: next(clock), process_time=lambda: 0.0))
    ending.wait_for_threads(patience_s=1.0)
    assert next(looks, None) is None
