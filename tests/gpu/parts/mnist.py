"""10 epochs of LeNet on MNIST, one GPU: how long they take, and how well it learns."""

from __future__ import annotations

from collections.abc import Iterator

from .. import expected
from ..row import Row, failed, figure
from . import Bench

EPOCHS = 10


def play(bench: Bench) -> Iterator[Row]:
    real = bench.mnist is not None
    data = ("--data_dir", str(bench.mnist)) if real else ("--data", "synthetic")
    name = "MNIST" if real else "made-up digits"
    arguments = ("--exp", "mnist_lenet", "--strategy", "none", "--epochs", str(EPOCHS), *data)
    if bench.facts.is_stand_in:  # whose evaluation counts no samples
        arguments = (*arguments, "--eval_every", "0")
    done = bench.runs.alone("mnist", *arguments, limit_s=bench.runs.left_s)
    for record in done.all("eval")[-1:]:
        what = f"{name}, accuracy after {record['epoch'] + 1} epochs"
        range_ = expected.MNIST_ACCURACY if real else expected.SYNTHETIC_ACCURACY
        yield figure(what, 100 * record["accuracy"], "%", range_ if record["epoch"] + 1 == EPOCHS else None)
    if done.succeeded:
        yield figure(f"{name}, {EPOCHS} epochs, evaluations included", done.last("end")["total_s"], "s")
        yield figure(f"{name}, step of 64", done.median("t_ms"), "ms")
    else:
        yield failed(f"{name}, {EPOCHS} epochs", done.cause)
