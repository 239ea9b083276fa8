"""A checkpoint's copy on a second host, made while training goes on: so that the loss of one host loses none.

    copies = Copies(run)            on every rank
    copies.begin(path)              on every rank, once rank 0 has written it; None where it could not
    copies.settle()                 it has arrived, or cannot

Rank 0 sends the file's bytes over a group of its own to one rank of another host, which the plan names
(ORCH_CHECKPOINT_COPY). That one writes them beside its place, compares their SHA-256 with the sender's, and gives the
file its name. It always lies in the job's own folder there (ORCH_CHECKPOINTS), wherever rank 0 keeps its checkpoints:
`checkpoint_dir` may be on a disk that all hosts share.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from trainer.checkpoints.file import forget_older, name_of, reason, updates_of, whole
from trainer.ranks.agreement import gather_lines
from trainer.ranks.process_group import timeout

if TYPE_CHECKING:
    from trainer.training.run import Run

_PIECE = 1 << 22
"""Bytes of one message: between two of them the others that want this rank's interpreter get it."""
_DIGEST = hashlib.sha256().digest_size


class Copies:
    """Those of one run; none where no other host is to keep any."""

    def __init__(self, run: Run) -> None:
        self._run, self._folder = run, Path(os.environ.get("ORCH_CHECKPOINTS", "checkpoints"))
        self._thread: threading.Thread | None = None
        self._keeper: int | None = None
        self._group: dist.ProcessGroup | None = None
        wanted = gather_lines(os.environ.get("ORCH_CHECKPOINT_COPY", ""))[0]
        if wanted and run.settings.checkpoint_every:
            self._keeper = keeper_of(gather_lines(run.info.node), wanted)
        if self._keeper is not None:
            made = dist.new_group([0, self._keeper], backend="gloo", timeout=timeout())
            self._group = cast("dist.ProcessGroup", made)

    def begin(self, path: Path | None) -> None:
        """path: of the checkpoint on rank 0; the others do not look at it."""
        if self._run.info.rank == 0 and self._keeper is not None:
            self._start(lambda: self._send(path))
        elif self._run.info.rank == self._keeper:
            self._start(self._receive)

    def settle(self) -> None:
        """Waits for what is on its way."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def _start(self, work: Callable[[], None]) -> None:
        def done() -> None:
            try:
                work()
            except (OSError, RuntimeError, ValueError) as error:  # torch's own are RuntimeErrors
                sys.stderr.write(f"cannot copy a checkpoint to its second host: {reason(error)}; training goes on\n")

        self._thread = threading.Thread(target=done, name="checkpoint's copy", daemon=True)
        self._thread.start()

    # ---- rank 0 -------------------------------------------------------------------------------------------------

    def _send(self, path: Path | None) -> None:
        updates = updates_of(path) if path else 0
        with open(path or os.devnull, "rb") as file:
            size, digest = os.fstat(file.fileno()).st_size if path else 0, hashlib.sha256()
            self._put(torch.tensor([size, updates]))
            for begin in range(0, size, _PIECE):
                piece = file.read(min(_PIECE, size - begin))
                digest.update(piece)
                self._put(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
            self._put(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8))

    def _put(self, tensor: torch.Tensor) -> None:
        dist.send(tensor, cast(int, self._keeper), group=self._group)

    # ---- the rank that keeps it -----------------------------------------------------------------------------------

    def _receive(self) -> None:
        began_s = time.perf_counter()
        size, updates = (int(number) for number in self._get(2, torch.long))
        pieces, name, failure = self._pieces(size), name_of(updates), None
        try:
            if size:
                with whole(self._folder / name) as file:
                    file.writelines(pieces)
                forget_older(self._folder)
        except OSError as error:
            failure = reason(error)
            sys.stderr.write(f"cannot keep a copy of checkpoint {name}: {failure}; training goes on\n")
        with contextlib.suppress(OSError):
            for _ in pieces:  # what this disk does not take: rank 0 waits until it is off the line
                pass
        copy_ms = round((time.perf_counter() - began_s) * 1000, 3)
        fields = {"step": updates - 1, "name": name, "bytes": 0 if failure else size, "copy_ms": copy_ms}
        if size:
            self._run.metrics.write("copy", **fields, failure=failure)

    def _pieces(self, size: int) -> Iterator[bytes]:
        """All that rank 0 sends. Raises OSError at the end where that is not what it read."""
        digest = hashlib.sha256()
        for begin in range(0, size, _PIECE):
            piece = self._get(min(_PIECE, size - begin), torch.uint8).numpy().tobytes()
            digest.update(piece)
            yield piece
        if self._get(_DIGEST, torch.uint8).numpy().tobytes() != digest.digest():
            raise OSError("its bytes are not as they were sent")

    def _get(self, count: int, kind: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(count, dtype=kind)
        dist.recv(tensor, 0, group=self._group)
        return tensor


def keeper_of(nodes: list[str], wanted: str) -> int | None:
    """The first rank of the host that is wanted; where that one is gone or is rank 0's own, of any other than rank
    0's. nodes: each rank's host.
    """
    others = [rank for rank, node in enumerate(nodes) if node != nodes[0]]
    return next((rank for rank in others if nodes[rank] == wanted), others[0] if others else None)
