"""10 epochs of LeNet on MNIST, one GPU: how long they take, and how well it learns."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .. import expected
from ..row import Row, failed, figure
from ..runs import Done
from . import Bench

EPOCHS = 10
_ON_STAND_IN = ("--eval_every", "0", "--samples", "1024")
"""Its evaluation counts no samples, and it learns nothing from more of them."""


def play(bench: Bench) -> Iterator[Row]:
    name = "MNIST" if bench.mnist else "made-up digits"
    done = _trained(bench)
    for record in done.all("eval")[-1:]:
        what = f"{name}, accuracy after {record['epoch'] + 1} epochs"
        range_ = expected.MNIST_ACCURACY if bench.mnist else expected.SYNTHETIC_ACCURACY
        yield figure(what, 100 * record["accuracy"], "%", range_ if record["epoch"] + 1 == EPOCHS else None)
    if done.succeeded:
        yield figure(f"{name}, {EPOCHS} epochs, evaluations included", done.last("end")["total_s"], "s")
        yield figure(f"{name}, step of 64", done.median("t_ms"), "ms")
    else:
        yield failed(f"{name}, {EPOCHS} epochs", done.cause)


def _trained(bench: Bench) -> Done:
    arguments = ["--exp", "mnist_lenet", "--strategy", "none", "--epochs", str(EPOCHS)]
    arguments += _ON_STAND_IN if bench.facts.is_stand_in else ()
    if bench.mnist is None:
        return bench.runs.alone("mnist", *arguments, "--data", "synthetic", limit_s=bench.runs.left_s)
    with _writable(bench.mnist) as folder:
        return bench.runs.alone("mnist", *arguments, "--data_dir", str(folder), limit_s=bench.runs.left_s)


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[Path]:
    """The trainer unpacks archives beside themselves: of a folder that is not ours, into a copy."""
    raw = folder / "MNIST" / "raw"
    if os.access(raw, os.W_OK) or not list(raw.glob("*.gz")):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="orch-mnist-") as copy:
        (Path(copy) / "MNIST").mkdir()
        shutil.copytree(raw, Path(copy) / "MNIST" / "raw", copy_function=shutil.copyfile)
        Path(copy, "MNIST", "raw").chmod(0o700)  # not as read-only as where it comes from
        yield Path(copy)
