"""Runs one rank from its settings to its exit code, and reports every failure."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from trainer.ranks import ending
from trainer.ranks.rank_info import RankInfo, read_rank_info
from trainer.shared.errors import TrainError
from trainer.shared.metrics import MetricsWriter
from trainer.shared.settings import AnySettings, CollectiveSettings


def run(settings: AnySettings, may_complain: Callable[[], bool] = lambda: True) -> int:
    """Reports failures on standard error and in the last record.

    may_complain: whether this rank prints its failure; ranks that fail as a consequence keep silent.
    """
    try:
        info = read_rank_info()
        metrics = MetricsWriter(info.metrics_path)
    except TrainError as error:
        if may_complain():
            say(f"error: {error}")
        return 1
    ending.watch(last_words=lambda: metrics.end("interrupted"))
    try:
        _work(settings, info, metrics)
    except ending.Interrupted as signal:
        metrics.end("interrupted", str(signal))
        if may_complain():
            say(f"interrupted by {signal}")
        ending.leave(128 + signal.signum)
    except TrainError as error:
        metrics.end("failed", str(error))
        if may_complain():
            say(f"error: {error}")
        ending.leave(1)
    except BaseException as error:
        metrics.end("failed", traceback.format_exception_only(error)[0].splitlines()[0][:300])
        if may_complain():
            traceback.print_exc()
        ending.leave(1)
    # Skips the interpreter's shutdown: a torch thread that is still running may abort a finished run.
    return ending.leave(0)


def say(line: str) -> None:
    sys.stderr.write(line + "\n")  # one write per line: torchrun's ranks share this stream


def _work(settings: AnySettings, info: RankInfo, metrics: MetricsWriter) -> None:
    # Imports torch only here, so that usage mistakes are answered at once.
    if isinstance(settings, CollectiveSettings):
        from trainer.measure.collectives import measure

        measure(settings, info, metrics)
    elif settings.profile_s:
        from trainer.measure.profile_run import profile

        profile(settings, info, metrics)
    else:
        from trainer.train import train

        train(settings, info, metrics)
