"""Before the interpreter ends: until no other thread of this process is at work.

    let_others_rest()

Torch's threads run our callbacks, and let go of what they have summed up, after whoever waits for the sum has gone on.
For that they take the interpreter's lock, and one that asks for it while the interpreter ends is unwound in the middle
of C++ that allows no such thing: the process dies of SIGABRT, `terminate called without an active exception`, though
all its work is done (pytorch/pytorch issues 38228 and 190489, open in 2026).
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

_PAUSE_S = 0.002
_LOOKS = 3
"""In a row: a thread that had waited for the lock runs in one of the pauses, and is seen in the look after it."""
_TASKS = Path("/proc/self/task")


def let_others_rest(patience_s: float = 1.0) -> None:
    """patience_s: of the processor's time, for a thread that computes as long as the process lives. On a busy machine
    one that is to let go soon may wait far longer for its turn.
    """
    until_s, at_rest = time.process_time() + patience_s, 0
    while at_rest < _LOOKS and time.process_time() < until_s:
        time.sleep(_PAUSE_S)  # whoever waits for the interpreter's lock has it meanwhile
        at_rest = 0 if _others_run() else at_rest + 1


def _others_run() -> bool:
    own = str(threading.get_native_id())
    states = [_state(task) for task in _TASKS.iterdir() if task.name != own]
    return "R" in states


def _state(task: Path) -> str:
    """As proc(5) has it; empty for a thread that has ended."""
    with contextlib.suppress(OSError):
        return (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""
