"""How many updates lie between two averages of `fidelity=local` where the person leaves that to us. Pure.

    plan = with_rounds(plan, view)          local_steps=0, resolved: settings, commands and a note

More steps hide more of the wire, and let the ranks drift further apart: the fewest are taken that are about as fast
as the most.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.errors import UsageError
from orchestrator.forecast.inputs import View, forecast_of, way_of
from orchestrator.planning.launch_plan import LaunchPlan
from trainer.shared.config import LOCAL_STEPS

NEAR = 0.99
"""Of the best speed: what is as good as that."""
SAME = 0.999
"""Of the speed with half of the steps overlapping: as few as that takes."""


def asks_for_rounds(plan: LaunchPlan) -> bool:
    return plan.settings.get("fidelity") == "local" and plan.settings.get("local_steps") == 0


def with_rounds(plan: LaunchPlan, view: View | UsageError) -> LaunchPlan:
    """The same plan with the fewest local steps that hide the wire, and the fewest of them that overlap, where it asks
    for them. view: or why nothing can be predicted; then it is LOCAL_STEPS.
    """
    if not asks_for_rounds(plan):
        return plan
    asked = int(plan.settings["local_overlap"])
    if isinstance(view, UsageError):
        every = max(LOCAL_STEPS, asked + 1)
        return _told(plan, every, asked, f"{every}, since {view.message}; {view.remedy}")
    every, overlap = fewest_steps(lambda *rounds: _speed(plan, view, *rounds), asked)
    samples_per_s = _speed(plan, view, every, overlap)
    words = f"{every}, {overlap} of them while an average travels: predicted at {samples_per_s:.4g} samples/s"
    return _told(plan, every, overlap, f"{words}, within 1 % of the most that {LOCAL_STEPS} would bring")


def fewest_steps(speed: Callable[[int, int], float], asked: int) -> tuple[int, int]:
    """Steps from one average to the next, and those that go on while it travels. speed: samples/s by both. asked: the
    setting `local_overlap`; -1 is up to half of the steps.
    """
    most = max(LOCAL_STEPS, asked + 1)
    speeds = {every: speed(every, every // 2 if asked < 0 else asked) for every in range(max(1, asked + 1), most + 1)}
    every = next(steps for steps in speeds if speeds[steps] >= NEAR * max(speeds.values()))
    overlaps = range(every // 2 + 1) if asked < 0 else (asked,)
    return every, next(overlap for overlap in overlaps if speed(every, overlap) >= SAME * speeds[every])


def _speed(plan: LaunchPlan, view: View, every: int, overlap: int) -> float:
    """Once the exact updates of `local_after` are over."""
    way = way_of({**plan.settings, "local_steps": every, "local_overlap": overlap, "local_after": 0})
    assert way  # noqa: S101 - for the type checker
    return forecast_of(plan, view, way).samples_per_s


def _told(plan: LaunchPlan, every: int, overlap: int, words: str) -> LaunchPlan:
    pairs = {"local_steps": every, "local_overlap": overlap}
    options = tuple(f"--{key}={value}" for key, value in pairs.items())
    keys = tuple(f"--{key}=" for key in pairs)
    nodes = tuple(
        node.model_copy(update={"command": (*(w for w in node.command if not w.startswith(keys)), *options)})
        for node in plan.nodes
    )
    update = {"settings": {**plan.settings, **pairs}, "nodes": nodes, "notes": (*plan.notes, f"local_steps=0: {words}")}
    return plan.model_copy(update=update)
