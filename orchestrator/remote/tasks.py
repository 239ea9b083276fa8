"""The tasks of one event loop, of which none may fail unheard.

tasks = Tasks(crashed)
tasks.watch_callbacks()         # what fails in a callback of the loop counts as well
tasks.spawn(coroutine)
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from .plain_asyncio import asyncio


class Tasks:
    """crashed: called with what a task raised, or a callback."""

    def __init__(self, crashed: Callable[[BaseException], None]) -> None:
        self._crashed = crashed
        self._tasks: set[asyncio.Task[None]] = set()

    def watch_callbacks(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._callback_failed)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._crashed(error)

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context and isinstance(error := context.get("exception"), Exception):
            self._crashed(error)
        loop.default_exception_handler(context)
