"""How the process of a script ends: with a last record, whatever happens, and without waiting for lost ranks."""

from __future__ import annotations

import atexit
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from trainer.ranks import interrupt
from trainer.ranks.resting import let_others_rest
from trainer.shared.errors import TrainError
from trainer.shared.metrics import MetricsWriter


class Ending:
    """From now on until the process ends."""

    def __init__(self) -> None:
        self.metrics = MetricsWriter(None)
        self.complete: Callable[[], None] | None = None
        """Ends the run well, once it has come to its end."""
        self._has_left = False
        interrupt.watch(last_words=lambda: self.metrics.end("interrupted"))
        sys.excepthook = self._failed
        atexit.register(self.end)

    def end(self) -> None:
        """The orderly end, once: leaves the other ranks together with them."""
        if self._has_left:
            return
        self._has_left = True
        try:
            if self.complete:
                self.complete()
            else:
                self.metrics.end("failed", "the script ended before its run did")
            let_others_rest()
        except BaseException as error:  # Python itself would print it, and end with 0
            self._failed(type(error), error, error.__traceback__)

    def _failed(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        self._has_left = True
        if sys.__stderr__:  # torch keeps what a hook prints until it returns, and this one never does
            sys.stderr = sys.__stderr__
        if isinstance(error, interrupt.Interrupted):
            self.metrics.end("interrupted", str(error))
            sys.stderr.write(f"interrupted by {error}\n")
            interrupt.leave(128 + error.signum)
        if isinstance(error, TrainError):
            self.metrics.end("failed", str(error))
            sys.stderr.write("".join(f"error: {line}\n" for line in str(error).splitlines()))
        else:
            self.metrics.end("failed", traceback.format_exception_only(kind, error)[-1].strip().splitlines()[0][:300])
            traceback.print_exception(kind, error, where)
        interrupt.leave(1)
