"""What a plan of `strategy=tensor` says of itself: `slice_notes(plan, view)`, one sentence. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.forecast.advice import Scene
from orchestrator.forecast.inputs import ForecastInputs, forecast_in, way_of
from orchestrator.forecast.tensor_step import is_cut, memory_bytes
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.units import format_bytes, format_figure, format_percent
from trainer.shared.settings import Settings

FEW_RANKS = 8
"""More ranks than this are not named one by one."""
BASIS = (
    "tensor: a step is the sum over its layers, each as slow as its slowest rank; BatchNorm, which all ranks compute "
    "whole, counts by its multiplications, ReLU and copies not at all"
)
HALF = ("bf16", "fp16")


def slice_notes(plan: LaunchPlan, view: ForecastInputs) -> Iterator[str]:
    """Who computes how much of each layer, what crosses, and what a rank holds."""
    settings = plan.training
    way = way_of(settings) if settings and settings.strategy == "tensor" else None
    if settings is None or way is None or len(plan.shares) < 2:
        return
    scene, shares = view.scene, plan.shares
    parts = _parts_at_once(scene, settings)
    predicted = forecast_in(scene, way, shares, settings.accumulate)
    exchanges = parts * (2 * sum(map(is_cut, scene.job.layers)) - 1)
    held = memory_bytes(scene.job.layers, shares, -(-scene.job.batch // parts), 0.5 if settings.amp in HALF else 1.0)
    yield (
        f"tensor: {_who(scene, shares)} of each layer's channels, all ranks the whole batch; "
        f"{format_figure(predicted.wire_bytes / 1e6)} MB of activations and their gradients cross in "
        f"{exchanges} exchanges an update; {format_bytes(max(held))} of memory on a rank at most"
    )


def _parts_at_once(scene: Scene, settings: Settings) -> int:
    """Micro-batches of an update."""
    caps = [speed.cap for host in scene.hosts for speed in host.speeds if speed.cap]
    return max(1, settings.accumulate, -(-scene.job.batch // min(caps, default=scene.job.batch)))


def _who(scene: Scene, shares: Sequence[int]) -> str:
    if len(shares) > FEW_RANKS:
        return f"each of {len(shares)} ranks computes {format_percent(max(shares) / sum(shares))} or less"
    names = [
        f"{host.name}:{rank}" if len(host.speeds) > 1 else host.name
        for host in scene.hosts
        for rank in range(len(host.speeds))
    ]
    parts = (format_percent(share / sum(shares)) for share in shares)
    first, *others = (f"{name} {part}" for name, part in zip(names, parts, strict=True))
    return ", ".join((first.replace(" ", " computes ", 1), *others))
