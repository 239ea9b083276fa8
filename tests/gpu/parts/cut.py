"""The network cut over two ranks, by its blocks (pipeline) and by its channels (tensor), beside one process that
accumulates over the same micro-batches: its first losses have to be the same; time and memory are to be compared.
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
_FIRST = {"tensor": 1}
"""Steps whose losses are judged, else 2: forward, and an update. Channels that are cut add gradients up in another
order, and fresh weights of ResNet-152 turn that rounding into a tenth of an update.
"""


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
            yield _compared(alone, done, _FIRST.get(name, 2), bench.facts.is_stand_in)


def _run(bench: Bench, name: str, *arguments: str) -> Done:
    """Kernels that add up in one order, so that the same work gives the same numbers."""
    size = ("--batch", str(_BATCH), "--accumulate", str(_PARTS), "--samples", str(_BATCH * _STEPS), "--epochs", "1")
    same = ("--augment", "none", "--lr", "0.001", "--cudnn_benchmark", "off")
    play = bench.runs.alone if name == "alone" else bench.runs.pair
    return play(f"cut-{name}", *RESNET, *size, *same, *arguments, limit_s=_LIMIT_S, GPU_DETERMINISTIC="1")


def _memory(done: Done) -> str:
    peaks = [number(end["peak_memory_bytes"] / 2**30) for end in done.all("end", rank=None)]
    return f"at most {' and '.join(peaks)} GiB"


def _compared(alone: Done, done: Done, first: int, is_stand_in: bool) -> Row:
    what = "  its first losses off one process's by"
    if is_stand_in:
        return skipped(what, "the stand-in computes no numbers")
    off = losses_off(alone, done)
    note = f"as a part of a step's; {max(off[:first]):.1e} in the first {first}, {max(off):.1e} in {len(off)} steps"
    return figure(what, max(off[:first]), "", expected.LOSS_OFF, note)


def losses_off(alone: Done, done: Done) -> list[float]:
    """Each step's difference, as a part of the loss of one process. Raises ValueError for other steps."""
    return [abs(one - other) / abs(one) for one, other in zip(losses(alone), losses(done), strict=True)]


def losses(done: Done) -> list[float]:
    """Of each step, over all ranks: those of a pipeline's last stage have it, or rank 0 of ranks that all see it."""
    steps = zip(*(done.all("step", rank) for rank in range(len(done.records))), strict=True)
    return [sum(step["loss"] for step in of_ranks) for of_ranks in steps]
