"""What the three kinds of paced ranks (whole network, stage, slices) have alike when a run begins."""

from __future__ import annotations

from trainer.paced.memory import keep_freed_memory
from trainer.paced.stage_clock import StageClock
from trainer.paced.stopwatch import Stopwatch
from trainer.shared.errors import TrainError
from trainer.shared.metrics import MetricsWriter
from trainer.shared.settings import Settings
from trainer.shared.strategy_table import STRATEGIES


def refuse_arithmetic(settings: Settings) -> None:
    """Raises TrainError for settings that would need a GPU's arithmetic."""
    asked = {f"strategy={settings.strategy}": not STRATEGIES[settings.strategy].on_paced}
    asked["sync_bn=true"] = settings.sync_bn
    asked[f"amp={settings.amp}"] = settings.amp != "none"
    asked["weights=FILE"] = bool(settings.weights)
    asked[f"ema={settings.ema:g}"] = settings.ema > 0
    asked[f"clip_norm={settings.clip_norm:g}"] = settings.clip_norm > 0
    for setting, is_set in asked.items():
        if is_set:
            raise TrainError(f"{setting} needs ranks that compute, this one is paced: leave it out, or leave paced out")


def keep_records(
    metrics: MetricsWriter, settings: Settings, stopwatch: Stopwatch | StageClock, needed_bytes: int
) -> None:
    """The run's records will say what memory the GPU would need, and how late this rank was."""
    keep_freed_memory()
    metrics.peak_memory_bytes = lambda: needed_bytes
    metrics.lateness = lambda: stopwatch.median_lateness(settings.warmup_steps)
