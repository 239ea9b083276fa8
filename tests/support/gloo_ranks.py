"""Real ranks over Gloo that stay, and serve one case after another: `gang.run(function, case)` on each of them.

A test calls a function of its own module by every rank, with the same case, and gets each rank's answer: so that a
property can be tried on hundreds of cases for one start of the processes.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.support.calm_gloo import calm_gloo
from trainer.ranks import RankInfo
from trainer.session import session
from trainer.setup import assemble
from trainer.shared import MetricsWriter, parse_settings

RANKS = 4
START_S = 200
"""The process that they are forked from has to import torch first."""


class Gang:
    def __init__(self, folder: Path, ranks: int = RANKS) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, f"file://{folder}/store", theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(START_S) and pipe.recv() == "ready", f"rank {rank} does not start"

    def run(self, function: Callable[..., Any], case: Any, timeout_s: float = 30) -> list[Any]:
        """function(rank, case) of every rank. Raises AssertionError with what a rank raised."""
        for pipe in self.pipes:
            pipe.send((function, case))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout_s):
                answers += [later.recv() for later in self.pipes[rank + 1 :] if later.poll(0)]
                errors = "; ".join(answer.text for answer in answers if isinstance(answer, Raised))
                raise AssertionError(f"rank {rank} gives no answer; {errors}")
            answers.append(pipe.recv())
        for answer in answers:
            assert not isinstance(answer, Raised), answer.text
        return answers

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Leaves:
    """The last answer of a rank: its process ends, as that of a script with an error, and others lose it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer


class Raised:
    def __init__(self, text: str) -> None:
        self.text = text


def group_of(size: int) -> dist.ProcessGroup:
    """Of the first so many ranks; made once, by all."""
    return _groups[size]


_groups: dict[int, Any] = {}


def _serve(rank: int, ranks: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    _groups.update({size: dist.new_group(range(size)) for size in range(1, ranks + 1)})
    pipe.send("ready")
    while True:
        function, case = pipe.recv()
        calm_gloo()
        try:
            answer = function(rank, case)
        except Exception:
            answer = Raised(traceback.format_exc())
        pipe.send(answer.answer if isinstance(answer, Leaves) else answer)
        if isinstance(answer, Leaves):
            pipe.close()
            os._exit(0)


@contextlib.contextmanager
def script_met(info: RankInfo, asked: Mapping[str, str]) -> Iterator[assemble.JoinedRank]:
    """As `trainer.join` has ranks meet, in the gang that is there, and that outlasts the run."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(assemble, "join", lambda *_: group_of(info.world_size)))
        stack.enter_context(patch.object(session, "leave", lambda: None))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield assemble.join_group(parse_settings("script", {"device": "cpu", **asked}), info, MetricsWriter(None))
