"""The supervisor's side of `preload`: starts it, and makes it torchrun.

preloading = Preloading(job, node, children)
preloading.begin()                                  # while the job is being prepared
ended = preloading.launch(argv, handles)            # None: torchrun has to be started afresh
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from .forked import PRELOAD, watched
from .layout import JobFolder
from .link import asyncio

_TORCHRUN = ["-m", "orch_remote.launch"]
_OF_TRAINER = ("torch", "trainer.train", "torchvision")
"""Imported for an experiment: our own code, which sets no variables before."""


class Preloading:
    def __init__(self, job: JobFolder, node: dict[str, Any], children: Any) -> None:
        self._job, self._node, self._children = job, node, children
        self._line: socket.socket | None = None
        self._ended: asyncio.Future[int] | None = None

    def begin(self) -> None:
        """Begins once. It only saves time: if it fails, all starts as with --no-preload."""
        if self._ended or not can_preload(self._node):
            return
        environment = self._children.environment()
        start = watched(self._job, environment, steps=False)
        if not start:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        said, says = os.pipe()
        is_trainer = self._node["command"][:2] == ["-m", "trainer"]
        names = ",".join(_OF_TRAINER if is_trainer else ("torch",))
        environment |= {**start, PRELOAD: f"{theirs.fileno()},{said}:{names}"}
        argv = [sys.executable, *self._node["command"]]
        try:
            with theirs:
                self._ended = self._children.start(argv, says, self._job.src, environment, [theirs.fileno(), said])
            self._line = ours
        except OSError as error:
            sys.stderr.write(f"torch is not loaded beforehand: {error}\n")
            ours.close()
        for handle in (said, says):
            os.close(handle)

    def launch(self, argv: Sequence[str], handles: Sequence[int]) -> asyncio.Future[int] | None:
        """handles: torchrun's log, and the store if this is the master. Returns torchrun's future exit code."""
        if self._line is None or self._ended is None or self._ended.done():
            return None
        order = {"argv": list(argv), "folder": str(self._job.bin)}
        with self._line, contextlib.suppress(OSError):
            socket.send_fds(self._line, [json.dumps(order).encode()], list(handles))
            return self._ended
        return None


def can_preload(node: dict[str, Any]) -> bool:
    """Ranks that all have one command line of Python, without flags by which it would go past `script_start`."""
    command = list(node["command"])
    while command[:1] == ["-u"]:
        del command[0]
    is_python = bool(command) and (command[0] == "-m" or not command[0].startswith("-"))
    is_other = node.get("is_program") or node.get("starts_ranks") or list(node["torchrun"][:2]) != _TORCHRUN
    is_own = any(word.startswith("--local_rank={") for word in command)
    return bool(node.get("preload")) and is_python and not is_other and not is_own
