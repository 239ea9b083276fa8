"""How many updates lie between two averages of `fidelity=local` where the person leaves that to us. Pure.

    draft = with_rounds(draft, view)        local_steps=0, resolved: settings and a note

More steps hide more of the wire, and let the ranks drift further apart: the fewest are taken that are about as fast
as the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.errors import UsageError
from orchestrator.forecast.asked import forecast_in, way_of
from orchestrator.forecast.inputs import ForecastInputs
from orchestrator.planning.draft import Draft
from orchestrator.units import format_figure
from trainer.shared.settings import Settings
from trainer.shared.strategy_table import LOCAL_STEPS

NEAR = 0.99
"""A speed of at least this part of the best counts as equally good."""
SAME = 0.999
"""The fewest overlapping steps are taken that reach this part of the speed with half of the steps overlapping."""


def with_rounds(draft: Draft, view: ForecastInputs | UsageError) -> Draft:
    """The same draft with the fewest local steps that hide the wire, and the fewest of them that overlap, where it asks
    for them. view: or why nothing can be predicted; then it is LOCAL_STEPS.
    """
    settings = draft.training
    if settings is None or settings.fidelity != "local" or settings.local_steps:
        return draft
    asked = settings.local_overlap
    if settings.strategy == "pipeline":
        every = max(LOCAL_STEPS, asked + 1)
        return _decided(draft, every, asked, f"{every}, for pipelines beside each other")
    if isinstance(view, UsageError):
        every = max(LOCAL_STEPS, asked + 1)
        return _decided(draft, every, asked, f"{every}, since {view.message}; {view.remedy}")

    def speed(every: int, overlap: int) -> float:
        return _samples_per_s(settings, draft.shares, view, every, overlap)

    every, overlap = fewest_steps(speed, asked)
    predicted = f"predicted at {format_figure(speed(every, overlap))} samples/s"
    words = f"{every}, {overlap} of them while an average travels: {predicted}"
    return _decided(draft, every, overlap, f"{words}, within 1 % of the most that {LOCAL_STEPS} would bring")


def fewest_steps(speed: Callable[[int, int], float], asked: int) -> tuple[int, int]:
    """Steps from one average to the next, and those that go on while it travels. speed: samples/s by both. asked: the
    setting `local_overlap`; -1 allows up to half of the steps (where a person sets `local_steps`, -1 is a quarter).
    """
    most = max(LOCAL_STEPS, asked + 1)
    speeds = {every: speed(every, every // 2 if asked < 0 else asked) for every in range(max(1, asked + 1), most + 1)}
    every = next(steps for steps in speeds if speeds[steps] >= NEAR * max(speeds.values()))
    overlaps = range(every // 2 + 1) if asked < 0 else (asked,)
    return every, next(overlap for overlap in overlaps if speed(every, overlap) >= SAME * speeds[every])


def _samples_per_s(settings: Settings, shares: Sequence[int], view: ForecastInputs, every: int, overlap: int) -> float:
    """Once the exact updates of `local_after` are over."""
    way = way_of(replace(settings, local_steps=every, local_overlap=overlap, local_after=0))
    assert way  # noqa: S101 - for the type checker
    return forecast_in(view.scene, way, shares, settings.accumulate).samples_per_s


def _decided(draft: Draft, every: int, overlap: int, words: str) -> Draft:
    return draft.settled({"local_steps": every, "local_overlap": overlap}, f"local_steps=0: {words}")
