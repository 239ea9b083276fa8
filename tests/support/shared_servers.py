"""The processes that tests fork ranks and programs from, which takes them seconds to become: one of each for all
workers, begun before the workers are, and ready by the time that the tests are collected.
"""

from __future__ import annotations

from multiprocessing import forkserver
from typing import Any

from tests.support import warm_python

_of_ranks: Any = forkserver._forkserver


def begin() -> None:
    warm_python.server()
    forkserver.ensure_running()


def take_over() -> None:
    """In a worker: multiprocessing would wait for the server as for a child, which it is not."""
    if _of_ranks._forkserver_pid is not None:
        _of_ranks.ensure_running = lambda: None
