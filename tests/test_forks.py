"""Nobody waits for what was forked after its reason has gone."""

from __future__ import annotations

import os
import signal
import threading
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


def test_a_server_ends_though_a_process_forked_from_ours_lives_on() -> None:
    server = forks._Server(forks.ORCH)  # beside the one that the other tests share
    read, write = os.pipe()
    if (holder := os.fork()) == 0:  # it has everything that is open here, as the workers of a data loader have
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        ending = threading.Thread(target=server.end, daemon=True)
        ending.start()
        ending.join(20)
        assert not ending.is_alive()
    finally:
        os.close(write)
        os.waitpid(holder, 0)
        os.close(read)
