"""ResNet-152 on one GPU: a whole update in three precisions, at batches of 64 to 2,048 as far as they fit.

It is the trainer's own profile: at each size untimed updates first, then the median of up to 15, each between two
marks on the GPU's time line, which are read after the stream that computes has nothing left.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import expected
from ..row import Row, failed, figure, number, skipped
from ..runs import RESNET, Done
from . import Bench

SIZES = (64, 128, 256, 512, 1024, 2048)
PRECISIONS = {"fp32": "none", "bf16": "bf16", "fp16": "fp16"}
_PROFILE_S = 25


def play(bench: Bench) -> Iterator[Row]:
    full: dict[int, float] = {}
    for precision, amp in PRECISIONS.items():
        done = profiled(bench, amp)
        if not done.last("profile"):
            yield left_out(f"ResNet-152, {precision}", bench, precision, done)
            continue
        record = done.last("profile")
        times = dict(zip(record["samples"], record["step_ms"], strict=True))
        yield from rows_of(bench.facts.gpu, precision, times, full)
        if record["worst_error"] is not None:
            what = f"{precision}: how far sizes lie from the line"
            yield figure(what, record["worst_error"], "", expected.PROFILE_ERROR)
        full = full or times


def profiled(bench: Bench, amp: str) -> Done:
    arguments = (*RESNET, "--amp", amp, "--batch", str(max(SIZES) // 2), "--profile_s", str(_PROFILE_S))
    return bench.runs.alone(f"alone-{amp}", *arguments, limit_s=_PROFILE_S + 45)


def rows_of(gpu: str, precision: str, times: dict[int, float], full: dict[int, float]) -> Iterator[Row]:
    """times: ms by samples; full: the same in fp32, empty where these are."""
    for size in SIZES:
        what = f"ResNet-152 {precision}, batch {size}"
        if size not in times:
            yield skipped(what, "does not fit into memory, or into the time")
            continue
        note = f"{number(1000 * size / times[size])} samples/s"
        yield figure(what, times[size], "ms", None if full else expected.step_ms(gpu, size), note)
        if full.get(size) and (range_ := expected.half_of_full(size)):
            yield figure(f"  as a part of fp32, batch {size}", times[size] / full[size], "", range_)


def left_out(what: str, bench: Bench, precision: str, done: Done) -> Row:
    """A card without the precision is no failure."""
    if precision == "bf16" and bench.facts.capability < (8, 0) and "amp" in done.cause:
        return skipped(what, f"compute capability below 8.0: {done.cause}")
    return failed(what, done.cause)
