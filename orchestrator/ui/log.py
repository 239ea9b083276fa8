"""A job's log for a browser: it is followed in a thread of its own, which ends soon after the browser has left.

A job may print nothing for hours, so neither a thread of the pool that answers requests nor the end of the page may
wait for its next line.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from orchestrator.controller import opened
from orchestrator.errors import OrchError
from orchestrator.jobs.record import ENDED
from orchestrator.paths import Home

LAST_LINES = 50
"""Of each of a rank's logs, from before."""
WAITING = 64
"""Pieces that the browser has not taken yet; then the job's hosts wait, never the job."""
LOOK_S = 1.0


async def log_lines(home: Home, job: str, has_left: Callable[[], Awaitable[bool]]) -> AsyncIterator[str]:
    pieces, left = asyncio.Queue[str | None](WAITING), threading.Event()
    loop = asyncio.get_running_loop()

    def say(piece: str | None) -> None:
        with contextlib.suppress(RuntimeError):  # the page has ended, and its loop
            put = asyncio.run_coroutine_threadsafe(pieces.put(piece), loop)
            while not left.is_set():
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    put.result(LOOK_S)
                    break

    def hear() -> None:
        try:
            for piece in _followed(home, job, lambda: not left.is_set()):
                say(piece)
        except OrchError as error:
            say(f"{error.message}\n")
        finally:
            say(None)

    threading.Thread(target=hear, daemon=True, name=f"log-{job}").start()
    try:
        while not await has_left():
            with contextlib.suppress(asyncio.TimeoutError):
                piece = await asyncio.wait_for(pieces.get(), LOOK_S)
                if piece is None:
                    return
                yield piece
    finally:
        left.set()


def _followed(home: Home, job: str, wanted: Callable[[], bool]) -> Iterator[str]:
    with opened(home) as controller:
        found = controller.jobs.find(job)
        goes_on, last = found.refresh().state not in ENDED, dict.fromkeys(range(found.plan.world_size), LAST_LINES)
        for event in found.follow(until_end=goes_on, last_lines=last, wanted=wanted):
            if isinstance(event, tuple):
                yield "".join(f"[{line.node} {line.rank}] {line.text}\n" for line in event)
