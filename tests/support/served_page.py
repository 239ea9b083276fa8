"""What the tests of `orch ui` share: its address, said by its process, and a script whose figures it shows.

with address_of(process) as url:
    get(url)
"""

from __future__ import annotations

import contextlib
import select
import signal
import subprocess
from collections.abc import Iterator

TRAINS = """
import json, os, time
rank = int(os.environ["RANK"])
print("hello from", rank, "<b>bold</b>", flush=True)
with open(os.environ["ORCH_METRICS"], "a", buffering=1) as file:
    file.write(json.dumps({"event": "start", "schema": 1, "steps": 100000, "rank": rank, "world_size": 2}) + "\\n")
    for step in range(100000):
        time.sleep(0.05)
        told = {"event": "step", "step": step, "samples": 10, "t_ms": 100.0, "load_ms": 1.0,
                "compute_ms": 97.0 - 40.0 * rank, "exposed_ms": 40.0 * rank, "optim_ms": 2.0,
                "comm_ms": 40.0 * rank, "loss": 3.0, "wall": time.time()}
        file.write(json.dumps(told) + "\\n")
"""
"""Of two ranks, 100 samples/s each, of which the second waits 40 % of its time."""


@contextlib.contextmanager
def address_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Of `orch ui`, started with its standard output in a pipe. A Ctrl-C ends it, well."""
    with process:
        try:
            assert process.stdout
            assert select.select([process.stdout], [], [], 60)[0], "it said no address"
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
