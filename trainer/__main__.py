"""The door: `torchrun --standalone --nproc-per-node 2 -m trainer --exp mnist_lenet [--key value]...`

Exit codes: 0 done; 1 it failed; 2 wrong usage; 130 and 143 ended by SIGINT and SIGTERM.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from trainer import interrupt
from trainer.config import AnySettings, CollectiveSettings, SettingsError, help_text, parse_arguments
from trainer.env import read_rank_info
from trainer.errors import TrainError
from trainer.records import MetricsWriter


def main(arguments: Sequence[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(help_text())
        return 0
    try:
        settings = parse_arguments(arguments)
    except SettingsError as error:
        for mistake in error.mistakes:
            _say(f"error: {mistake}")
        return 2
    return run(settings)


def run(settings: AnySettings) -> int:
    """Trains or measures; whatever goes wrong is told on standard error and in the last record."""
    try:
        info = read_rank_info()
        metrics = MetricsWriter(info.metrics_path)
    except TrainError as error:
        _say(f"error: {error}")
        return 1
    interrupt.watch(last_words=lambda: metrics.end("interrupted"))
    try:
        # torch only now: a usage mistake is answered at once
        if isinstance(settings, CollectiveSettings):
            from trainer.collectives import measure as work
        else:
            from trainer.train import train as work

        work(settings, info, metrics)
    except interrupt.Interrupted as signal:
        metrics.end("interrupted", str(signal))
        _say(f"interrupted by {signal}")
        interrupt.leave(128 + signal.signum)
    except TrainError as error:
        metrics.end("failed", str(error))
        _say(f"error: {error}")
        interrupt.leave(1)
    except BaseException as error:
        metrics.end("failed", traceback.format_exception_only(error)[0].splitlines()[0][:300])
        traceback.print_exc()
        interrupt.leave(1)
    # Not through the interpreter's own end: a thread of torch's that is still there then may abort a finished run.
    return interrupt.leave(0)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")  # one write a line: torchrun's ranks share this stream


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
