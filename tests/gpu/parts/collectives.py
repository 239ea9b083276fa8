"""Every collective on GPU tensors between two ranks, each result checked: over NCCL's sockets, and over Gloo."""

from __future__ import annotations

from collections.abc import Iterator

from .. import expected
from ..network import shaped
from ..row import Row, failed, figure, finding, skipped
from ..runs import Done
from . import Bench

_BUDGET_S, _LIMIT_S = 20, 50
_MOST_BYTES = 1 << 24


def play(bench: Bench) -> Iterator[Row]:
    if bench.facts.is_stand_in:
        yield skipped("collectives", "results are compared on the GPU, and the stand-in computes no comparison")
        return
    prefix, why_not = shaped()
    for backend in ("nccl", "gloo"):
        done = bench.runs.pair(
            f"collectives-{backend}",
            *("--exp", "collectives", "--backend", backend, "--device", "cuda"),
            *("--max_bytes", str(_MOST_BYTES), "--budget_s", str(_BUDGET_S)),
            limit_s=_LIMIT_S,
            prefix=prefix,
        )
        yield from rows_of(backend, done, why_not)


def rows_of(backend: str, done: Done, why_not: str) -> Iterator[Row]:
    records = done.all("collective")
    operations = list(dict.fromkeys(record["operation"] for record in records))
    refused = {record["operation"]: record["error"] for record in records if record["time_ms"] is None}
    right = [name for name in operations if any(r["operation"] == name and r["time_ms"] for r in records)]
    if not done.succeeded:
        yield failed(f"collectives, {backend}", f"{done.cause} (after {', '.join(right) or 'none'})")
        return
    refusals = "; ".join(f"{name}: {error}" for name, error in refused.items() if name not in right)
    yield finding(
        f"collectives, {backend}: right results",
        right == operations,
        f"{len(right)} of {len(operations)}",
        "all",
        note=refusals,
    )
    sums = [record for record in records if record["operation"] == "all_reduce" and record["busbw_gbps"]]
    if sums:
        largest = sums[-1]
        note = f"{largest['bytes'] >> 10} KiB; alpha {1000 * sums[0]['time_ms']:.0f} us" + (
            f"; lo is not shaped: {why_not}" if why_not else ""
        )
        yield figure(
            f"  all_reduce, {backend}", largest["busbw_gbps"], "Gbps", None if why_not else expected.BUS_GBPS, note
        )
