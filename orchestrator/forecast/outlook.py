"""Predicts the speed of a plan as it stands; for `strategy=auto`, chooses its strategy first. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.forecast.advice import preference, ways
from orchestrator.forecast.cut import BASIS, pipeline_for, prediction_of_pipeline, settled
from orchestrator.forecast.inputs import ForecastInputs, allowed, forecast_in, kept, way_of
from orchestrator.forecast.step import Way
from orchestrator.planning.build import Draft
from orchestrator.planning.launch_plan import LaunchPlan, Prediction
from orchestrator.units import format_figure
from trainer.shared.experiments import OWN
from trainer.shared.setting_fields import SettingsError
from trainer.shared.settings import Settings


def prediction_of(plan: LaunchPlan, view: ForecastInputs) -> Prediction | None:
    """With the plan's shares and micro-batches. None if its strategy is not predicted."""
    settings = plan.training
    if settings and settings.strategy == "pipeline":
        return prediction_of_pipeline(settings, view)
    way = way_of(settings) if settings else None
    if settings is None or way is None:
        return None
    forecast = forecast_in(view.scene, way, plan.shares, settings.accumulate)
    return Prediction(
        step_ms=forecast.step_ms,
        samples_per_s=forecast.samples_per_s,
        binds=forecast.limited_by,
        is_estimate=view.is_estimate,
        basis=(*view.basis, *_way_words(way)),
    )


def _way_words(way: Way) -> Iterator[str]:
    if way.exact_part:
        yield f"the mean of the run: {100 * way.exact_part:.3g} % of its updates exact, then {way.fidelity}"
    if way.sync_bn:
        yield "sync_bn: ranks meet in every BatchNorm, forward and backward, so that no sum of gradients is hidden"
    if way.strategy == "tensor":
        yield BASIS


def with_best_way(draft: Draft, settings: Settings, view: ForecastInputs) -> Draft:
    """The fastest strategy that its fidelity and the trainer allow, with a note. settings: the draft's; the user's
    choices stay. Raises UsageError if none fits.
    """
    fidelity, chosen = allowed(settings), draft.request.chosen
    tried = ways(fidelity, kept(settings, chosen))
    forecasts = [
        (forecast_in(view.scene, way, draft.shares, settings.accumulate), changes)
        for way in (tried if view.scene.holds_whole else ())
        if (changes := runnable(settings, way, chosen))
    ]
    cut = pipeline_for(view.scene, settings, chosen)
    speeds = (preference(each.way.strategy, each.samples_per_s) for each, _ in forecasts)
    is_own = settings.model == OWN
    if cut and preference("pipeline", cut.samples_per_s, is_own=is_own) > max(speeds, default=0.0):
        return settled(draft, cut, f"strategy=auto ({fidelity})")
    if not forecasts:
        raise UsageError(f"strategy=auto: no strategy fits fidelity {fidelity} and these settings", "name one")
    forecast, changes = max(forecasts, key=lambda each: preference(each[0].way.strategy, each[0].samples_per_s))
    words = ", ".join(f"{key}={value}" for key, value in changes.items())
    predicted = f"predicted at {format_figure(forecast.samples_per_s)} samples/s"
    return draft.settled(changes, f"strategy=auto: {words} ({fidelity}), {predicted}")


def runnable(settings: Settings, way: Way, chosen: Collection[str]) -> dict[str, Any] | None:
    """Settings for this way, without chosen ones. None if the trainer would refuse them."""
    if way.half_wire and way.fidelity == "local" and settings.wire not in ("bf16", "fp16"):
        return None  # the user chose otherwise
    changes: dict[str, Any] = {"strategy": way.strategy}
    changes |= {"bucket_mib": way.bucket_mib} if way.strategy == "ddp" else {}
    try:
        dataclasses.replace(settings, **changes)
    except SettingsError:
        return None
    return {name: value for name, value in changes.items() if name not in chosen}
