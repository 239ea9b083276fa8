"""Pipelines in plans: best cut, prediction and notes; for `strategy=tensor`, only notes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from orchestrator.errors import UsageError
from orchestrator.forecast.advice import Scene
from orchestrator.forecast.inputs import ForecastInputs, forecast_in, way_of
from orchestrator.forecast.pipeline.choice import PipelineChoice, as_set, choose
from orchestrator.forecast.tensor_step import is_cut, memory_bytes
from orchestrator.planning.build import Draft
from orchestrator.planning.launch_plan import LaunchPlan, Prediction
from orchestrator.units import format_bytes, format_figure, format_percent
from trainer.shared.config import OF_PIPELINE
from trainer.shared.setting_fields import SettingsError
from trainer.shared.settings import Settings

MOST_HOSTS = 8
"""With more hosts the search takes too long for a plan."""


def pipeline_for(
    scene: Scene, settings: Settings, chosen: Collection[str], fidelity: str = ""
) -> PipelineChoice | None:
    """The fastest cut, or the one in `stages`. None for a single rank, too little memory, or settings that the trainer
    refuses.

    chosen: the user's settings, which stay. fidelity: in place of the settings' own. Raises UsageError if `stages` do
    not fit the job.
    """
    if scene.wire.ranks < 2 or len(scene.hosts) > MOST_HOSTS:
        return None
    try:
        asked = replace(settings, strategy="pipeline", fidelity=fidelity or settings.fidelity)
    except SettingsError:
        return None
    if not asked.stages:
        return choose(scene, asked, chosen)
    try:
        return as_set(scene, asked)
    except ValueError as error:
        raise UsageError(str(error), "leave stages out: the plan then cuts by the hosts' speeds") from error


def with_stages(draft: Draft, view: ForecastInputs) -> Draft:
    """Adds the best cut, with a note, if the user chose none. Raises UsageError if memory is too small for any cut."""
    settings = draft.training
    if settings is None or settings.strategy != "pipeline" or settings.stages:
        return draft
    if not 2 <= len(view.scene.hosts) <= MOST_HOSTS:
        return draft  # the ranks choose the cut by their speeds
    found = pipeline_for(view.scene, settings, draft.request.chosen)
    if found is None:
        ranks = "four hosts (fidelity=local: two pipelines)" if settings.fidelity == "local" else "two ranks"
        raise UsageError(
            "strategy=pipeline: no cut of this network fits these hosts",
            f"it takes {ranks} or more, and memory for each part: leave hosts out with --nodes, or use ddp",
        )
    return settled(draft, found, "strategy=pipeline")


def settled(draft: Draft, found: PipelineChoice, why: str) -> Draft:
    changes = {name: value for name, value in found.settings.items() if name not in draft.request.chosen}
    words = ", ".join(f"{key}={value}" for key, value in changes.items() if f"{key}={value}" != why)
    predicted = f"predicted at {format_figure(found.samples_per_s)} samples/s"
    if found.gain:
        predicted += f", {format_percent(found.gain, 1)} more than with equal micro-batches"
    return draft.settled(changes, f"{why}: {words}; {predicted}")


def prediction_of_pipeline(settings: Settings, view: ForecastInputs) -> Prediction | None:
    found = pipeline_for(view.scene, settings, OF_PIPELINE)
    if found is None:
        return None
    return Prediction(
        step_ms=1000 * found.timed.seconds,
        samples_per_s=found.samples_per_s,
        binds=found.limited_by,
        is_estimate=view.is_estimate,
        basis=(*view.basis, *mean_words(found.exact_part, settings.fidelity)),
    )


def mean_words(exact_part: float, fidelity: str) -> Iterator[str]:
    if exact_part:
        yield f"the mean of the run: {100 * exact_part:.3g} % of its updates exact, then {fidelity}"


def stage_notes(settings: Settings | None, view: ForecastInputs) -> Iterator[str]:
    """Per stage: work, memory, bytes sent."""
    if settings and settings.strategy == "pipeline" and (found := pipeline_for(view.scene, settings, OF_PIPELINE)):
        yield from found.words


# Notes on `strategy=tensor`. Pure.

FEW_RANKS = 8
"""More ranks are not named."""
BASIS = (
    "tensor: a step is the sum over its layers, each as slow as its slowest rank; BatchNorm, which all ranks compute "
    "whole, counts by its multiplications, ReLU and copies not at all"
)
HALF = ("bf16", "fp16")


def slice_notes(plan: LaunchPlan, view: ForecastInputs) -> Iterator[str]:
    """Each rank's share of a layer, the traffic, and memory."""
    settings = plan.training
    way = way_of(settings) if settings and settings.strategy == "tensor" else None
    if settings is None or way is None or len(plan.shares) < 2:
        return
    scene, shares = view.scene, plan.shares
    parts = _parts_at_once(scene, settings)
    predicted = forecast_in(scene, way, shares, settings.accumulate)
    exchanges = parts * (2 * sum(map(is_cut, scene.job.layers)) - 1)
    kept = 0.5 if settings.amp in HALF else 1.0
    held = memory_bytes(scene.job.layers, shares, -(-scene.job.batch // parts), kept, settings.states)
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
