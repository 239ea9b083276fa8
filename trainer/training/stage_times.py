"""What a stage of a pipeline did in a step, for its records.

stage_times(timer, exchange)            {"bubble_before_ms": 1.2, "bubble_behind_ms": 0.0, "wire_ms": 4.1}
task_rows(timer, exchange, ...)         [["forward", 0, 0.1, 2.3, None, 2.2], ...], as the `tasks` event has them
"""

from __future__ import annotations

import time
from typing import Any

from trainer.compute.timer import Timer
from trainer.shared.metrics import STAGE_TIMES
from trainer.shared.turns import Task
from trainer.strategies import Exchange

Row = list[Any]


def stage_times(timer: Timer, exchange: Exchange) -> dict[str, float | None]:
    """In milliseconds, as the `step` record names them; null outside a pipeline."""
    if exchange.wire_ms is None:
        return dict.fromkeys(STAGE_TIMES)
    before_ms, behind_ms = (
        sum(
            (timer.ms(one.since, one.begin) for one in exchange.tasks if one.task is task and one.since is not None),
            0.0,
        )
        for task in (Task.FORWARD, Task.BACKWARD)
    )
    return dict(zip(STAGE_TIMES, (round(ms, 3) for ms in (before_ms, behind_ms, exchange.wire_ms)), strict=True))


def has_marks(updates: int, warmup_steps: int) -> bool:
    """Do the marks of this update go into the records? updates: before it, of this process. So it is for the first one
    after the warm-up, and for the 10th, 100th and so on: readers take the latest, and a run of any length has one.
    """
    is_power_of_ten = updates >= 10 and str(updates).rstrip("0") == "1"
    return updates == warmup_steps or (updates > warmup_steps and is_power_of_ten)


def task_rows(timer: Timer, exchange: Exchange, begin: Any, summed: Any, updated: Any) -> list[Row]:
    """Milliseconds since a step's begin, on the clock of the device; the host's is compared with it now.

    begin, summed, updated: the marks of the step's begin, of its summed gradient and of the optimiser's end.
    """
    now = timer.mark()
    timer.wait_for(now)
    now_s, now_ms = time.perf_counter(), timer.ms(begin, now)

    def of_mark(mark: Any) -> float | None:
        return None if mark is None else round(timer.ms(begin, mark), 3)

    def of_host(moment_s: float | None) -> float | None:
        return None if moment_s is None else round(now_ms + 1000 * (moment_s - now_s), 3)

    tasks: list[Row] = [
        [one.task.value, one.number, of_mark(one.begin), of_mark(one.end), of_host(one.came_s), of_mark(one.sent)]
        for one in exchange.tasks
    ]
    return [
        *tasks,
        ["sum", None, of_mark(exchange.computed), of_mark(summed), None, None],
        ["optimiser", None, of_mark(summed), of_mark(updated), None, None],
    ]
