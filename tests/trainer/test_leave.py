"""How a rank's process ends where loader processes still run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITH_LOADERS = """
import io, multiprocessing, signal, sys
from trainer.ranks.ending import leave

def torchs(signum, frame):
    raise RuntimeError("DataLoader worker is killed")

class SeesThemEnd(io.StringIO):
    def flush(self):
        while multiprocessing.active_children():
            pass

for _ in range(2):
    multiprocessing.get_context("fork").Process(target=signal.pause).start()
signal.signal(signal.SIGCHLD, torchs)
sys.stdout = SeesThemEnd()
leave(7)
"""


def test_the_loaders_that_a_rank_ends_do_not_end_it_with_an_error() -> None:
    """torch's DataLoader has a handler that raises when one of its processes dies."""
    done = subprocess.run([sys.executable, "-c", WITH_LOADERS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")
