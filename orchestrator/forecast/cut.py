"""Pipelines among the ways to run a job: whether it may be one, and the cut that its plan settles on. Pure.

found = pipeline_for(scene, settings, chosen)       the fastest that the settings allow, or None
draft = with_stages(draft, view)                    strategy=pipeline without `stages`, resolved
prediction_of_pipeline(settings, view)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from orchestrator.errors import UsageError
from orchestrator.forecast.advice import Scene
from orchestrator.forecast.inputs import ForecastInputs
from orchestrator.forecast.pipeline.choice import PipelineChoice, as_set, choose
from orchestrator.planning.build import Draft
from orchestrator.planning.launch_plan import Prediction
from orchestrator.units import format_figure
from trainer.shared.config import OF_PIPELINE
from trainer.shared.setting_fields import SettingsError
from trainer.shared.settings import Settings

MOST_HOSTS = 8
"""Of more, the search for a cut takes longer than a person waits for a plan."""


def pipeline_for(scene: Scene, settings: Settings, chosen: Collection[str]) -> PipelineChoice | None:
    """Of all cuts the fastest; with `stages`, the one that they say. None for a single rank, where memory holds none,
    and where the trainer would refuse it.

    chosen: settings that the person made, which stay. Raises UsageError where `stages` do not fit the job.
    """
    if scene.wire.ranks < 2 or len(scene.hosts) > MOST_HOSTS:
        return None
    try:
        asked = replace(settings, strategy="pipeline")
    except SettingsError:
        return None
    if not asked.stages:
        return choose(scene, asked, chosen)
    try:
        return as_set(scene, asked)
    except ValueError as error:
        raise UsageError(str(error), "leave stages out: the plan then cuts by the hosts' speeds") from error


def with_stages(draft: Draft, view: ForecastInputs) -> Draft:
    """The same draft with a pipeline's cut, where the person leaves it to us; it says so. Raises UsageError where no
    host has memory for its part, however the network is cut.
    """
    settings = draft.training
    if settings is None or settings.strategy != "pipeline" or settings.stages:
        return draft
    if not 2 <= len(view.scene.hosts) <= MOST_HOSTS:
        return draft  # the ranks cut it themselves, by their speeds
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
    return draft.settled(changes, f"{why}: {words}; predicted at {format_figure(found.samples_per_s)} samples/s")


def prediction_of_pipeline(settings: Settings, view: ForecastInputs) -> Prediction | None:
    found = pipeline_for(view.scene, settings, OF_PIPELINE)
    if found is None:
        return None
    return Prediction(
        step_ms=1000 * found.timed.seconds,
        samples_per_s=found.samples_per_s,
        binds=found.limited_by,
        is_estimate=view.is_estimate,
        basis=view.basis,
    )


def stage_notes(settings: Settings | None, view: ForecastInputs) -> Iterator[str]:
    """Of each stage of a pipeline: its work, its memory, what it sends."""
    if settings and settings.strategy == "pipeline" and (found := pipeline_for(view.scene, settings, OF_PIPELINE)):
        yield from found.words
