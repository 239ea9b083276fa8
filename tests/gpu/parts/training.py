"""The trainer's step at batch 256, beside a bare loop of the same network that nobody records."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from trainer.shared import fields_of

from .. import child, expected
from ..here import visible
from ..row import Row, failed, figure, number
from ..runs import RESNET, WARM_UP, Done
from . import Bench
from .alone import PRECISIONS, left_out

_STEPS = 40
_BATCH = 256
_LIMIT_S = 60
SWITCHES = ("cuda_graph", "channels_last", "cudnn_benchmark", "fused_sgd")
"""Settings of the trainer that change a step's speed alone, each auto, on or off."""


def play(bench: Bench) -> Iterator[Row]:
    bare_ms: dict[str, float] = {}
    for name, options in (("plain SGD", ()), ("fused SGD", ("--fused",))):
        what = f"bare loop, fp32, {name}"
        bare = _bare(bench, name, *options)
        if isinstance(bare, str):
            yield failed(what, bare)
        else:
            bare_ms[name] = bare
            yield figure(what, bare, "ms", note="batch 256, synchronised once, at its end")
    yield from _trained(bench, min(bare_ms.values(), default=None))


def _bare(bench: Bench, name: str, *options: str) -> float | str:
    """ms a step, or why there is none."""
    command = [sys.executable, "-m", "tests.gpu.bare", "--batch", str(_BATCH), *options]
    log, limit_s = bench.folder / f"bare-{name.split()[0]}.log", min(_LIMIT_S * bench.runs.patience, bench.runs.left_s)
    ended = child.run(command, log, limit_s, {"CUDA_VISIBLE_DEVICES": visible(0)})
    lines = [line for line in ended.output.splitlines() if line.startswith('{"step_ms"')]
    return json.loads(lines[-1])["step_ms"] if ended.succeeded and lines else ended.cause


def _trained(bench: Bench, bare_ms: float | None) -> Iterator[Row]:
    for precision, amp in PRECISIONS.items():
        what = f"trainer {precision}, batch {_BATCH}"
        done = _run(bench, f"training-{amp}", amp)
        if not done.succeeded:
            yield left_out(what, bench, precision, done)
            continue
        t_ms = done.median("t_ms")
        parts = ", ".join(f"{name.removesuffix('_ms')} {number(done.median(name))}" for name in _PARTS)
        yield figure(what, t_ms, "ms", note=f"{number(1000 * _BATCH / t_ms)} samples/s; {parts} ms")
        if amp == "none" and bare_ms:
            yield figure("  as a part of the bare loop's", t_ms / bare_ms, "", expected.STEP_OF_BARE)
        yield from _without_switches(bench, amp, t_ms)


def _without_switches(bench: Bench, amp: str, t_ms: float) -> Iterator[Row]:
    """t_ms: a step's, as the switches are by themselves."""
    switches = [name for name in SWITCHES if name in fields_of("mnist_lenet")]
    if not switches:
        return
    done = _run(bench, f"training-{amp}-off", amp, *(word for name in switches for word in (f"--{name}", "off")))
    if not done.succeeded:
        yield failed("  with every switch off", done.cause)
        return
    off_ms = done.median("t_ms")
    yield figure("  with every switch off", off_ms, "ms", note=f"off: {', '.join(switches)}")
    yield figure("  a step as a part of that", t_ms / off_ms, "", expected.STEP_OF_SWITCHED_OFF)


def _run(bench: Bench, name: str, amp: str, *more: str) -> Done:
    size = ("--batch", str(_BATCH), "--samples", str(_BATCH * (_STEPS + WARM_UP)), "--epochs", "1")
    ways = ("--strategy", "none", "--amp", amp, *more)
    return bench.runs.alone(name, *RESNET, *size, *ways, limit_s=_LIMIT_S)


_PARTS = ("load_ms", "compute_ms", "optim_ms")
