"""Who is ended while it waits for a forked command ends that, and does not wait for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

import pytest

from tests.support import forks


class Ended(BaseException):
    pass


def end(signum: int, frame: FrameType | None) -> None:
    raise Ended


def test_a_command_ends_with_the_one_who_waits_for_it(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    try:
        with pytest.raises(Ended):
            forks.run(forks.ORCH, ["ui"], env={**os.environ, "ORCH_HOME": str(tmp_path)})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
