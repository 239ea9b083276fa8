"""Files beneath a folder, opened step by step: no link on the way is followed, whoever made it.

    with folder(job.root) as top, holder(top, "src/runs/best.pt") as (at, last):
        handle = os.open(last, READ, dir_fd=at)

What another user may rename or replace cannot lead us elsewhere: each step is taken from the folder that the step
before it opened (openat(2)).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO without a writer must not hold us


@contextlib.contextmanager
def folder(path: Path | str, dir_fd: int | None = None) -> Iterator[int]:
    """An open folder of our own. Raises OSError, PermissionError where it is another user's."""
    handle = os.open(path, FOLDER, dir_fd=dir_fd)
    try:
        if os.fstat(handle).st_uid != os.getuid():
            raise PermissionError(1, "belongs to another user", str(path))
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def holder(top: int, name: str) -> Iterator[tuple[int, str]]:
    """The open folder that holds this file, and the file's own name in it. Raises OSError as `folder` does."""
    *above, last = name.split("/")
    with contextlib.ExitStack() as opened:
        for part in above:
            top = opened.enter_context(folder(part, top))
        yield top, last
