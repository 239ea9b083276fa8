"""A script's interpreter ends after torch's threads have let go of its callbacks."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time

import pytest

from trainer.ranks import resting

SCRIPT = """
import datetime, functools, hashlib
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.distributed as dist
from trainer.session.ending import Ending


class SlowToGo:
    # As a thread that the kernel sets aside at the worst moment: it has said that the sum is there, and has not let go
    # of what it called.
    def __call__(self, summed):
        return summed.value()[0]

    def __del__(self):
        hashlib.pbkdf2_hmac("sha256", b"", b"", 750_000)


ending = Ending()
store = dist.HashStore()
join = functools.partial(dist.ProcessGroupGloo, store, size=2, timeout=datetime.timedelta(seconds=60))
with ThreadPoolExecutor() as pool:  # two ranks in one process, so that each knows when the other takes part
    one, other = pool.map(lambda rank: join(rank=rank), range(2))
summed = one.allreduce([torch.ones(4)]).get_future().then(SlowToGo())
other.allreduce([torch.ones(4)]).wait()
summed.wait()
ending.complete = lambda: None
"""


def test_a_callback_that_is_let_go_late_takes_no_process_down() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nobody_waits_for_threads_that_wait_themselves() -> None:
    waiting = threading.Thread(target=threading.Event().wait, daemon=True)
    waiting.start()
    began_s = time.monotonic()
    resting.let_others_rest(patience_s=60.0)
    assert time.monotonic() - began_s < 30.0 and waiting.is_alive()


def test_one_that_computes_is_waited_for() -> None:
    computes = ("sha256", b"", b"", 500_000)  # without the interpreter's lock
    thread = threading.Thread(target=hashlib.pbkdf2_hmac, args=computes, daemon=True)
    thread.start()
    resting.let_others_rest(patience_s=60.0)
    assert not thread.is_alive()


def test_one_that_never_rests_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "_others_run", lambda: True)
    began_s = time.monotonic()
    resting.let_others_rest(patience_s=0.01)
    assert time.monotonic() - began_s >= 0.01
