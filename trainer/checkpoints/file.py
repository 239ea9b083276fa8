"""The checkpoint file and its folder: atomic writes, safe reads, copies on a second host.

A file holds only containers and tensors (`torch.load(path, weights_only=True)`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.ranks.agreement import gather_lines
from trainer.ranks.process_group import timeout
from trainer.shared.errors import TrainError

if TYPE_CHECKING:
    from trainer.training.run import Run


SCHEMA = 3
KEPT = 2
"""Checkpoints per folder, in case the disk damages the newest."""
BUFFERS = "buffers."
"""The prefix of buffers that differ from `model`; they may have any type."""
_SET_ASIDE = ".damaged"
_NAME = re.compile(r"step-(\d{9})\.pt")
_ZIP = b"PK\x03\x04"
_PART = re.compile(r"data\.pkl|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id|data/\d+")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Checkpoint:
    schema: int
    settings: dict[str, Any]
    data: str
    """Identifies the data set."""
    train_samples: int
    world_size: int
    names: list[str]
    """By rank, like `shares`, `sums`, `own`, `random` and `kept`."""
    shares: list[int]
    epoch: int
    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, list[Tensor | None]]
    """State of the whole network, as in `kept_state`."""
    scaler: dict[str, Any]
    sums: list[list[float]]
    """loss_sum, samples and recent of `Progress`."""
    own: list[dict[str, Tensor]]
    random: list[Tensor]
    ema: dict[str, Tensor] = field(default_factory=dict)
    """The weights' moving average, named as in `model`; empty without one."""
    kept: list[Tensor] = field(default_factory=list)
    """Per rank, bytes of the script's state and other random generators (`kept_state`); [] in older files."""


def write_file(path: Path, checkpoint: Checkpoint) -> int:
    """Returns bytes. Raises OSError or RuntimeError."""
    with whole(path) as file:
        torch.save(vars(checkpoint), file)
        return file.tell()


@contextlib.contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """Makes a file appear complete and synced, or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")  # a folder has one writer, so leftovers are overwritten
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class DamagedError(TrainError):
    """Damaged, or never a checkpoint."""


class FoundCheckpoint(NamedTuple):
    checkpoint: Checkpoint
    content: bytes
    passed_over: dict[Path, str]
    """Newer damaged files and their messages."""


def read_file(source: Path) -> FoundCheckpoint:
    """source: a file, or a folder for its newest undamaged one. Raises TrainError."""
    damaged: dict[Path, str] = {}
    try:
        paths = sorted(_checkpoints(source), reverse=True) if source.is_dir() else [source]
    except OSError as error:
        raise TrainError(f"resume: cannot list {source} ({error.strerror})") from error
    for path in paths:
        try:
            content = _read(path)
            return FoundCheckpoint(parse(content, str(path)), content, damaged)
        except DamagedError as error:
            damaged[path] = str(error)
    if damaged:
        before = [path for path in _checkpoints(source.parent) if path.name < source.name]
        raise TrainError(next(iter(damaged.values())) + (f"; the one before it is {max(before)}" if before else ""))
    raise TrainError(f"resume: no checkpoint in {source}; one is written every `checkpoint_every` updates")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"resume: cannot read {path} ({error.strerror}): name a checkpoint or a folder of checkpoints"
        raise DamagedError(problem) from error


def read_plain(content: bytes, name: str) -> Any:
    """Raises DamagedError unless torch.save wrote exactly these containers, numbers and tensors."""
    # Before 2.6 torch reads tar files in the old, unsafe way despite `weights_only` (CVE-2025-32434), and a zip may
    # have anything in front of it. So torch only gets files that begin as a zip and have exactly the parts of
    # torch.save.
    if not content.startswith(_ZIP):
        raise DamagedError(f"resume: {name} is damaged, or no checkpoint (it does not begin as a zip)")
    try:
        # Compares checksums: torch itself would accept a flipped bit in a weight.
        with zipfile.ZipFile(io.BytesIO(content)) as parts:
            _check_parts(parts.namelist())
            damaged = parts.testzip()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning of torch 2.0 about itself
            raw = {} if damaged else torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # zipfile and torch raise many types of errors for foreign files
        raise DamagedError(f"resume: {name} is damaged, or no checkpoint ({reason(error)})") from error
    if damaged:
        raise DamagedError(f"resume: {name} is damaged: the checksum of {damaged} in it is wrong")
    return raw


def parse(content: bytes, name: str) -> Checkpoint:
    """Raises TrainError if the content is damaged, newer or foreign. Never executes any of it."""
    raw = read_plain(content, name)
    if isinstance(raw, dict) and raw.get("schema") == 2:
        raw = _of_sgd_alone(raw)
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if isinstance(schema, int) and schema != SCHEMA:
        age, remedy = ("a newer", "update") if schema > SCHEMA else ("an older", "start again without it")
        raise TrainError(f"resume: {name} is of {age} version ({schema}, this trainer reads {SCHEMA}): {remedy}")
    try:
        checkpoint = Checkpoint(**raw)
        _check_form(checkpoint)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise TrainError(f"resume: {name} is no checkpoint of this trainer ({reason(error)})") from error
    return checkpoint


def _of_sgd_alone(raw: dict[str, Any]) -> dict[str, Any]:
    """Converts schema 2, which had only SGD's state."""
    moved = raw.pop("momentum", None)
    has_moved = isinstance(moved, list) and any(one is not None for one in moved)
    return {**raw, "schema": SCHEMA, "optimizer": {"momentum_buffer": moved} if has_moved else {}}


def _check_parts(names: list[str]) -> None:
    """Raises ValueError unless the zip has exactly the parts of torch.save."""
    tops = {name.partition("/")[0] for name in names}
    parts = [name.partition("/")[2] for name in names]
    strange = next((part for part in parts if not _PART.fullmatch(part)), None)
    if len(tops) != 1 or strange is not None or "data.pkl" not in parts or len(set(parts)) != len(parts):
        raise ValueError("it does not have the parts that torch.save writes")


def _check_form(saved: Checkpoint) -> None:
    """Raises TypeError or ValueError."""
    size = saved.world_size
    if not all(
        isinstance(number, int) and number >= 0 for number in (saved.train_samples, size, saved.epoch, saved.step)
    ):
        raise TypeError("a count or position is not a whole number of at least 0")
    of_all: list[tuple[list[Any], type]] = [
        (saved.names, str),
        (saved.shares, int),
        (saved.sums, list),
        (saved.own, dict),
        (saved.random, Tensor),
        (saved.kept or saved.random, Tensor),
    ]
    for of_ranks, kind in of_all:
        if len(of_ranks) != size or size == 0 or not all(isinstance(one, kind) for one in of_ranks):
            raise ValueError("the ranks' parts do not fit their number")
    if any(len(sums) != 3 or not all(isinstance(one, float) for one in sums) for sums in saved.sums):
        raise ValueError("a rank's sums are incomplete")
    if not all(isinstance(one, Tensor) for own in saved.own for one in own.values()):
        raise TypeError("a rank's own state is not a tensor")
    like = [{name: one for name, one in own.items() if not name.startswith(BUFFERS)} for own in saved.own]
    if not all(one.is_floating_point() for own in like for one in own.values()):
        raise TypeError("a rank's own state is not a tensor of floating point")
    have_parts = bool(saved.settings.get("stages"))
    if not have_parts and any(_shapes(own) != _shapes(like[0]) for own in like):
        raise ValueError("the ranks' own states differ in name or shape")
    if not all(isinstance(tensor, Tensor) for tensor in [*saved.model.values(), *saved.ema.values()]):
        raise TypeError("a weight is not a tensor")
    if not all(
        tensor is None or isinstance(tensor, Tensor) for of_kind in saved.optimizer.values() for tensor in of_kind
    ):
        raise TypeError("a part of the optimiser's state is not a tensor")
    if not isinstance(saved.settings, dict) or not isinstance(saved.scaler, dict) or not isinstance(saved.data, str):
        raise TypeError("the settings, the scaler or the name of the data have another type")


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# ---------------------------------------------------------------------------------------------------------------------


def name_of(updates: int) -> str:
    return f"step-{updates:09}.pt"


def updates_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def newest(folder: Path) -> Path | None:
    return max(_checkpoints(folder), default=None)


def open_folder(folder: Path, updates: int, damaged: Iterable[Path] = ()) -> None:
    """Renames `damaged` files. Raises TrainError if the folder cannot be made or holds checkpoints beyond `updates`."""
    # Another run's newer checkpoints would be taken for this run's.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in damaged:
            if path.parent.samefile(folder):
                path.replace(path.with_name(path.name + _SET_ASIDE))
        found = newest(folder)
    except OSError as error:
        if error.errno in _NO_ROOM:
            return  # reported when the first checkpoint cannot be written
        raise TrainError(f"checkpoint_dir: cannot use {folder} ({error.strerror}): name another") from error
    if found and updates_of(found) > updates:
        raise TrainError(
            f"checkpoint_dir: {found} is of an earlier run and further than update {updates}, where this one begins: "
            "go on from it with --resume, or name another folder"
        )


def forget_older(folder: Path) -> None:
    for path in sorted(_checkpoints(folder))[:-KEPT]:
        path.unlink()


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []


_PIECE = 1 << 22
"""Bytes per message; other threads get the interpreter in between."""
_DIGEST = hashlib.sha256().digest_size


class Copies:
    """Copies each checkpoint to a second host (ORCH_CHECKPOINT_COPY) while training continues."""

    # The copy goes to the job's own folder (ORCH_CHECKPOINTS): `checkpoint_dir` may be on a disk that all hosts share.

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
        """A collective call. path: rank 0's file, None if writing failed."""
        if self._run.info.rank == 0 and self._keeper is not None:
            self._start(lambda: self._send(path))
        elif self._run.info.rank == self._keeper:
            self._start(self._receive)

    def settle(self) -> None:
        """Waits for the current copy."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def _start(self, work: Callable[[], None]) -> None:
        def done() -> None:
            try:
                work()
            except (OSError, RuntimeError, ValueError) as error:  # torch raises RuntimeError
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
            for _ in pieces:  # read the rest, so that rank 0 can finish sending
                pass
        copy_ms = round((time.perf_counter() - began_s) * 1000, 3)
        fields = {"step": updates - 1, "name": name, "bytes": 0 if failure else size, "copy_ms": copy_ms}
        if size:
            self._run.metrics.write("copy", **fields, failure=failure)

    def _pieces(self, size: int) -> Iterator[bytes]:
        """Raises OSError at the end if the checksum is wrong."""
        digest = hashlib.sha256()
        for begin in range(0, size, _PIECE):
            piece = self._get(min(_PIECE, size - begin), torch.uint8).numpy().tobytes()
            digest.update(piece)
            yield piece
        if self._get(_DIGEST, torch.uint8).numpy().tobytes() != digest.digest():
            raise OSError("the checksum of the received bytes is wrong")

    def _get(self, count: int, kind: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(count, dtype=kind)
        dist.recv(tensor, 0, group=self._group)
        return tensor


def keeper_of(nodes: list[str], wanted: str) -> int | None:
    """The first rank on host `wanted`, otherwise the first outside rank 0's host. nodes: of each rank."""
    others = [rank for rank, node in enumerate(nodes) if node != nodes[0]]
    return next((rank for rank in others if nodes[rank] == wanted), others[0] if others else None)
