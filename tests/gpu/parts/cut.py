"""The network cut over two ranks, by its blocks (pipeline) and by its channels (tensor), beside one process that
accumulates over the same micro-batches: its first losses have to be the same; time and memory are to be compared. Ways
with CUDA graphs are compared with one process with CUDA graphs.
"""

from __future__ import annotations

import pydoc_data
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import expected
from ..rank import TRACED
from ..row import Row, failed, figure, number, skipped
from ..runs import RESNET, Done
from . import Bench
from .overlap import events_of

_BATCH, _STEPS = 256, 12
_LIMIT_S = 45


@dataclass(frozen=True)
class Way:
    """micro_batches: of an update. judged: steps whose losses are, two for forward and an update. Channels that are cut
    add gradients up in another order, and fresh weights of ResNet-152 turn that rounding into a tenth of an update.
    """

    micro_batches: int
    judged: int
    arguments: tuple[str, ...]
    graph: str = "off"
    exp: tuple[str, ...] = RESNET
    batch: int = _BATCH


_GPT = (
    "--exp",
    "gpt_text",
    "--model",
    "gpt_small",
    "--eval_every",
    "0",
    "--data_dir",
    str(Path(pydoc_data.__file__).parent),
)
"""On text that ships with Python."""
WAYS: dict[str, Way] = {
    "pipeline": Way(8, 2, ("--strategy", "pipeline")),
    "pipeline, 1f1b": Way(8, 2, ("--strategy", "pipeline", "--schedule", "1f1b")),
    "pipeline, graphs": Way(8, 2, ("--strategy", "pipeline"), "on"),
    "pipeline, 1f1b, graphs": Way(8, 2, ("--strategy", "pipeline", "--schedule", "1f1b"), "on"),
    "pipeline, GPT": Way(8, 2, ("--strategy", "pipeline"), "on", _GPT, 64),
    # One: NCCL takes 4.5 ms a call where both ranks share a GPU (an H100, November 2026), and it calls at each layer.
    "tensor": Way(1, 1, ("--strategy", "tensor")),
}


def play(bench: Bench) -> Iterator[Row]:
    alone: dict[str, Done] = {}
    for name, way in WAYS.items():
        base = f"alone-{way.micro_batches}-{way.graph}-{way.batch}"
        if base not in alone:
            alone[base] = _run(bench, base, way, "--strategy", "none")
            graphs = ", graphs" if way.graph == "on" else ""
            yield _row(f"1 process, batch {way.batch} in {way.micro_batches}{graphs}", alone[base])
        one, done = alone[base], _run(bench, name.replace(", ", "-"), way, *way.arguments)
        yield _row(f"2 ranks, {name}", done)
        if one.succeeded and done.succeeded:
            yield _compared(one, done, way.judged, bench.facts.is_stand_in)
            if way.graph == "on":
                ratio = done.median("t_ms") / one.median("t_ms")
                yield figure("  its step / one process's", ratio, "", expected.CUT_STEP, "both ranks share the GPU")
    yield from _launches(bench)


def _launches(bench: Bench) -> Iterator[Row]:
    """Of each stage's micro-batch, kernels and graphs alike, with its part of the update's."""
    what, way = "2 ranks, pipeline, graphs, fp16: launches per micro-batch", WAYS["pipeline, graphs"]
    if bench.facts.is_stand_in:
        yield skipped(what, "CUPTI asks the driver, and the stand-in has none; tests/cuda counts them")
        return
    done = _run(
        bench, "launches", way, *way.arguments, "--amp", "fp16", GPU_TRACE=str(bench.folder / "cut-{rank}.json")
    )
    for rank in (0, 1):
        trace = bench.folder / f"cut-{rank}.json"
        found = launches_of(trace) if trace.exists() else 0
        trace.unlink(missing_ok=True)
        if not done.succeeded or not found:
            yield failed(what, done.cause) if not done.succeeded else skipped(what, "CUPTI showed none")
            return
        yield figure(f"{what}, rank {rank}", found / TRACED / way.micro_batches, "", expected.CUT_LAUNCHES)


def launches_of(trace: Path) -> int:
    calls = [event["name"] for kind in ("cuda_runtime", "cuda_driver") for event in events_of(trace, kind)]
    return sum("Launch" in name for name in calls)


def _run(bench: Bench, name: str, way: Way, *arguments: str, **environment: str) -> Done:
    """Kernels that add up in one order, so that the same work gives the same numbers."""
    size = ("--batch", str(way.batch), "--accumulate", str(way.micro_batches), "--samples", str(way.batch * _STEPS))
    same = ("--epochs", "1", "--augment", "none", "--lr", "0.001", "--cudnn_benchmark", "off")
    graph = ("--cuda_graph", way.graph)
    play = bench.runs.alone if name.startswith("alone") else bench.runs.pair
    return play(
        f"cut-{name}",
        *way.exp,
        *size,
        *same,
        *graph,
        *arguments,
        limit_s=_LIMIT_S,
        GPU_DETERMINISTIC="1",
        **environment,
    )


def _row(what: str, done: Done) -> Row:
    if not done.succeeded:
        return failed(what, done.cause)
    parts = ", ".join(f"{part} {number(done.median(f'{part}_ms'))}" for part in ("compute", "exposed", "optim"))
    return figure(what, done.median("t_ms"), "ms", note=f"{parts} ms; {_memory(done)}")


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
