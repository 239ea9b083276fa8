"""The network cut over two ranks, by its blocks (pipeline) and by its channels (tensor), beside one process that
accumulates over the same micro-batches: losses have to be the same; time and memory are there to be compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import expected
from ..row import Row, failed, figure, number, skipped
from ..runs import RESNET, Done
from . import Bench

_BATCH, _PARTS, _STEPS = 256, 8, 12
_LIMIT_S = 45
WAYS: dict[str, tuple[str, ...]] = {
    "pipeline": ("--strategy", "pipeline"),
    "pipeline, 1f1b": ("--strategy", "pipeline", "--schedule", "1f1b"),
    "tensor": ("--strategy", "tensor"),
}


def play(bench: Bench) -> Iterator[Row]:
    what = f"1 process, {_PARTS} micro-batches of {_BATCH // _PARTS}"
    alone = _run(bench, "alone", "--strategy", "none")
    if alone.succeeded:
        yield figure(what, alone.median("t_ms"), "ms", note=_memory(alone))
    else:
        yield failed(what, alone.cause)
    for name, arguments in WAYS.items():
        done = _run(bench, name.replace(", ", "-"), *arguments)
        if not done.succeeded:
            yield failed(f"2 ranks, {name}", done.cause)
            continue
        parts = ", ".join(f"{part} {number(done.median(f'{part}_ms'))}" for part in ("compute", "exposed", "optim"))
        yield figure(f"2 ranks, {name}", done.median("t_ms"), "ms", note=f"{parts} ms; {_memory(done)}")
        if alone.succeeded:
            yield _compared(alone, done, bench.facts.is_stand_in)


def _run(bench: Bench, name: str, *arguments: str) -> Done:
    """Kernels that add up in one order, so that the same work gives the same numbers."""
    size = ("--batch", str(_BATCH), "--accumulate", str(_PARTS), "--samples", str(_BATCH * _STEPS), "--epochs", "1")
    same = ("--augment", "none", "--lr", "0.001", "--cudnn_benchmark", "off")
    play = bench.runs.alone if name == "alone" else bench.runs.pair
    return play(f"cut-{name}", *RESNET, *size, *same, *arguments, limit_s=_LIMIT_S, GPU_DETERMINISTIC="1")


def _memory(done: Done) -> str:
    peaks = [number(end["peak_memory_bytes"] / 2**30) for end in done.all("end", rank=None)]
    return f"at most {' and '.join(peaks)} GiB"


def _compared(alone: Done, done: Done, is_stand_in: bool) -> Row:
    what = "  its losses off one process's by"
    if is_stand_in:
        return skipped(what, "the stand-in computes no numbers")
    return figure(what, loss_off(alone, done), "", expected.LOSS_OFF, "the largest of a step's, as a part of it")


def loss_off(alone: Done, done: Done) -> float:
    """Of all steps the largest difference, as a part of the loss of one process. Raises ValueError for other steps."""
    pairs = zip(losses(alone), losses(done), strict=True)
    return max(abs(one - other) / abs(one) for one, other in pairs)


def losses(done: Done) -> list[float]:
    """Of each step, over all ranks: those of a pipeline's last stage have it, or rank 0 of ranks that all see it."""
    steps = zip(*(done.all("step", rank) for rank in range(len(done.records))), strict=True)
    return [sum(step["loss"] for step in of_ranks) for of_ranks in steps]
