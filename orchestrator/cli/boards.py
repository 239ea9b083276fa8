"""Progress of push, pull and setup on a terminal: one line per host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from orchestrator.jobs import pull
from orchestrator.provision import push, venvs
from orchestrator.units import one_line
from orchestrator.views import console


@contextmanager
def hash_board(name: str) -> Iterator[Callable[[int, int], None]]:
    with _progress(_words("node"), BarColumn(), DownloadColumn(), TimeRemainingColumn()) as board:
        task = board.add_task("", node=f"reading {one_line(name)}", total=None)
        yield lambda done, total: board.update(task, completed=done, total=total)


@contextmanager
def push_board(nodes: Sequence[str], total_bytes: int) -> Iterator[Callable[[push.PushProgress], None]]:
    figures = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _progress(_words("node"), _words("phase"), *figures) as board:
        tasks = {node: board.add_task("", node=node, phase="connects", total=total_bytes) for node in nodes}
        sending = set[str]()

        def show(progress: push.PushProgress) -> None:
            done = progress.looked_bytes if progress.phase == "looks" else progress.here_bytes
            if (
                progress.phase == "sends" and progress.node not in sending
            ):  # bytes already there must not count as speed
                sending.add(progress.node)
                board.reset(tasks[progress.node], completed=done, total=total_bytes)
            board.update(tasks[progress.node], completed=min(done, total_bytes), phase=progress.phase)

        yield show


@contextmanager
def pull_board(totals: Mapping[str, int]) -> Iterator[Callable[[pull.PullProgress], None]]:
    figures = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _progress(_words("node"), _words("phase"), *figures) as board:
        tasks = {node: board.add_task("", node=node, phase="connects", total=total) for node, total in totals.items()}
        pulling = set[str]()

        def show(progress: pull.PullProgress) -> None:
            done = min(progress.here_bytes, progress.total_bytes)
            if progress.phase == "pulls" and progress.node not in pulling:  # bytes already here must not count as speed
                pulling.add(progress.node)
                board.reset(tasks[progress.node], completed=done, total=progress.total_bytes)
            board.update(tasks[progress.node], completed=done, phase=progress.phase)

        yield show


@contextmanager
def setup_board(nodes: Sequence[str]) -> Iterator[Callable[[venvs.SetupProgress], None]]:
    with _progress(_words("node"), TimeElapsedColumn(), _words("phase"), _words("line")) as board:
        tasks = {node: board.add_task("", node=node, phase="connects", line="", total=None) for node in nodes}
        yield lambda progress: board.update(tasks[progress.node], phase=progress.phase, line=progress.line)


def _words(field: str) -> TextColumn:
    return TextColumn("{task.fields[" + field + "]}", markup=False)


def _progress(*columns: ProgressColumn) -> Progress:
    return Progress(*columns, console=console.err, disable=not console.err.is_terminal, transient=True)
