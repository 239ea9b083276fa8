"""What `orch plan` predicts of a lab, and what its simulator plays, of any settings and at any speed of the hosts.

model = Model(planned(lab, {}), runs)       a plan as `orch run --dry-run --json` gives it
model.forecast(row.settings).samples_per_s
model.played_of_sum(row.settings)           by the simulator, over the sum of the hosts alone
model.fast_enough(row.settings, 0.9)        how many times as fast the hosts may be
model.cut({"batch": 256})                   settings of the pipeline that is predicted best
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.forecast import Forecast, HostSpeed, Scene, Way, forecast_in, inputs_of, read_network, way_of
from orchestrator.forecast.pipeline import as_set, choose
from orchestrator.planning import LaunchPlan
from tests.support.simulate import simulate_step_ms
from trainer.shared import Speed, settings_from
from trainer.shared.settings import Settings

MOST = 1024.0
"""Times as fast, or as slow, as anybody asks for."""


class Model:
    """plan: of a whole lab. runs: where its measurements of the links lie."""

    def __init__(self, plan: Mapping[str, Any], runs: Path) -> None:
        self.plan = LaunchPlan.model_validate(plan)
        self.network = read_network(runs, self.plan)
        self.view = inputs_of(self.plan, {}, self.network)

    @property
    def measured_gbps(self) -> float:
        """What the links carried in the run of collectives, on which all predictions here rest."""
        return self.network.bps / 1e9 if self.network else math.nan

    def step_ms(self, settings: Mapping[str, Any]) -> float:
        return 1000 * int(settings["batch"]) / self.samples_per_s(settings)

    def samples_per_s(self, settings: Mapping[str, Any], times: float = 1.0) -> float:
        """times: as fast as the hosts are all of them."""
        if settings["strategy"] == "pipeline":
            return as_set(self._scene(settings, times), self._settings(settings)).samples_per_s
        return self.forecast(settings, times).samples_per_s

    def cut(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ValueError where memory holds none."""
        asked = {**settings, "strategy": "pipeline"}
        found = choose(self._scene(asked), self._settings(asked), settings.keys())
        if found is None:
            raise ValueError(f"no pipeline fits: {asked}")
        return dict(found.settings)

    def forecast(self, settings: Mapping[str, Any], times: float = 1.0) -> Forecast:
        """Of any strategy but a pipeline. times: as in `samples_per_s`."""
        scene = self._scene(settings, times)
        return forecast_in(scene, self._way(settings), self._shares(scene, settings), self._micro(settings))

    def of_sum(self, settings: Mapping[str, Any], times: float = 1.0) -> float:
        return self.samples_per_s(settings, times) / sum(self._scene(settings, times).alone.values())

    def played_of_sum(self, settings: Mapping[str, Any]) -> float | None:
        """None of a pipeline, whose forecast plays it already."""
        if settings["strategy"] == "pipeline":
            return None
        scene = self._scene(settings)
        predicted = self.forecast(settings)
        step_ms = simulate_step_ms(scene.job, scene.hosts, scene.wire, predicted.way, predicted.shares)
        return 1000 * scene.job.batch / step_ms / sum(scene.alone.values())

    def alone(self, batch: int) -> Mapping[str, float]:
        """Samples/s of each host with the whole batch."""
        return self._scene({"batch": batch}).alone

    def fast_enough(self, settings: Mapping[str, Any], least: float) -> float | None:
        """How many times as fast as they are all hosts may become until this falls below so much of the sum. None where
        no speed is slow enough.
        """
        return last_true(lambda times: self.of_sum(settings, times) >= least)

    def _way(self, settings: Mapping[str, Any]) -> Way:
        found = way_of(self._settings(settings))
        assert found, settings
        return found

    def _settings(self, settings: Mapping[str, Any]) -> Settings:
        """The plan's, with a row's in their place."""
        found = settings_from(self.plan.exp, {**self.plan.settings, **settings})
        assert isinstance(found, Settings)
        return found

    def _scene(self, settings: Mapping[str, Any], times: float = 1.0) -> Scene:
        scene = self.view.scene.with_batch(int(settings["batch"]))
        return dataclasses.replace(scene, hosts=tuple(_at(host, times) for host in scene.hosts))

    def _shares(self, scene: Scene, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """A row's own are by speed, and speeds change alike."""
        return scene.measured if settings.get("shares") else scene.equal

    def _micro(self, settings: Mapping[str, Any]) -> int:
        return int(settings.get("accumulate", 0))


def _at(host: HostSpeed, times: float) -> HostSpeed:
    speeds = (Speed(speed.fixed_ms / times, speed.sample_ms / times, speed.cap) for speed in host.speeds)
    return dataclasses.replace(host, speeds=tuple(speeds))


def last_true(holds: Callable[[float], bool]) -> float | None:
    """To one in a hundred, between 1 / MOST and MOST, of what holds for small numbers and for no larger ones."""
    low, high = 1 / MOST, MOST
    if not holds(low):
        return None
    if holds(high):
        return high
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
