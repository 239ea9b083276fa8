"""A profile where memory ends early: the largest batch that fits is found, and running out costs nothing but that."""

from __future__ import annotations

from collections.abc import Iterator

from ..row import Row, failed, figure, finding
from ..runs import RESNET
from . import Bench

PART, LEAST_BYTES = 0.06, 4 << 30
"""Of the GPU's memory, and never less than that: the network and its momentum alone take 1.6 GiB."""
_PROFILE_S = 20


def play(bench: Bench) -> Iterator[Row]:
    memory_bytes = bench.facts.found["gpus"][0]["memory_bytes"]
    part = min(1.0, max(PART, LEAST_BYTES / memory_bytes))
    what = f"profile in {part * memory_bytes / 2**30:.1f} GiB"
    profile_s = round(_PROFILE_S * max(1.0, bench.runs.patience))
    arguments = (*RESNET, "--batch", "8192", "--profile_s", str(profile_s))
    done = bench.runs.alone("memory", *arguments, limit_s=bench.runs.left_s, GPU_MEMORY_PART=str(part))
    record = done.last("profile")
    if not record:
        yield failed(what, done.cause)
        return
    yield finding(f"{what}: ends well", done.succeeded, "yes" if done.succeeded else done.cause, "yes")
    cap = record["cap"]
    if cap is None:
        largest = max(record["samples"])
        yield failed(f"{what}: most samples", f"memory was no limit: {largest} samples fit, or the time was over")
        return
    yield figure(f"{what}: most samples", cap, "samples", note=f"measured up to {max(record['samples'])}")
    yield finding(
        f"{what}: tried between sizes",
        cap & (cap - 1) != 0,
        "yes" if cap & (cap - 1) else "no",
        "yes",
        "by reading: memory of a failed try that is not given back leaves a power of two",
    )
