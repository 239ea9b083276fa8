"""Two ranks over NCCL's sockets on a wire of 2.5 Gbps: whether each strategy ends, and what of the wire it shows."""

from __future__ import annotations

from collections.abc import Iterator

from .. import expected
from ..network import shaped
from ..row import Range, Row, failed, figure, number
from ..runs import RESNET, Done
from . import Bench

_STEPS = 14
_LIMIT_S = 75
WAYS: dict[str, tuple[str, ...]] = {
    "allreduce_flat": ("--strategy", "allreduce_flat"),
    "ddp": ("--strategy", "ddp"),
    "ddp, half": ("--strategy", "ddp", "--fidelity", "half"),
    "local": ("--fidelity", "local", "--local_steps", "6", "--local_overlap", "3"),
    "fsdp": ("--strategy", "fsdp"),
}


def play(bench: Bench) -> Iterator[Row]:
    prefix, why_not = shaped()
    found: dict[str, Done] = {}
    for name, arguments in WAYS.items():
        done = bench.runs.pair(
            f"two-{name.replace(', ', '-')}",
            *RESNET,
            *("--backend", "nccl", "--batch", "256", "--samples", "4096", "--steps", str(_STEPS)),
            *arguments,
            limit_s=_LIMIT_S,
            prefix=prefix,
        )
        if not done.succeeded:
            yield failed(f"2 ranks, {name}", done.cause)
            continue
        found[name] = done
        yield from _rows(name, done, why_not)
    yield from wire_in_compute(found)


def _rows(name: str, done: Done, why_not: str) -> Iterator[Row]:
    """why_not: why `lo` has no 2.5 Gbps, where it has not."""
    parts = ("compute_ms", "exposed_ms", "optim_ms")
    note = ", ".join(f"{part.removesuffix('_ms')} {number(done.median(part))}" for part in parts) + " ms"
    yield figure(f"2 ranks, {name}", done.median("t_ms"), "ms", note=note)
    if name == "local":
        return
    range_ = None if why_not or name == "fsdp" else expected.comm_ms(0.5 if "half" in name else 1.0)
    note = f"lo is not shaped: {why_not}" if why_not else ""
    yield figure("  of it with a gradient under way", done.median("comm_ms"), "ms", range_, note)


def wire_in_compute(found: dict[str, Done]) -> Iterator[Row]:
    """Whether the computing stream waits for buckets: it did, where a step computes longer by what it sends."""
    if not {"ddp", "allreduce_flat"} <= found.keys():
        return
    longer_ms = found["ddp"].median("compute_ms") - found["allreduce_flat"].median("compute_ms")
    part = longer_ms / found["ddp"].median("comm_ms")
    range_: Range = expected.WIRE_IN_COMPUTE
    yield figure("ddp: part of the wire inside compute", part, "", range_, f"{number(longer_ms)} ms longer than flat")
