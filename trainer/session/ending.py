"""How the process of a script ends: with a last record, whatever happens, and without waiting for lost ranks."""

from __future__ import annotations

import atexit
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from trainer.ranks import interrupt
from trainer.ranks.resting import let_others_rest
from trainer.shared.errors import TrainError
from trainer.shared.metrics import MetricsWriter

LEFT_EARLY = (
    "the script ended before its run did ({}): by break, sys.exit() or a caught exception. To stop early, leave "
    "run.epochs() after the same epoch on every rank, and call run.end()"
)


class Ending:
    """From now on until the process ends.

    A script that ends before its run is over fails: the other ranks wait for it, and an exit code of 0 would name them
    as the cause.
    """

    def __init__(self) -> None:
        self.metrics = MetricsWriter(None)
        self.complete: Callable[[], None] | None = None
        """Completes the run when the process ends; None until the run is over."""
        self.place: Callable[[], str] = lambda: "before its first update"
        """How far the run has come, on which rank and host."""
        self._exit_code = 1
        self._has_left = False
        interrupt.watch(last_words=lambda: self.metrics.end("interrupted"))
        sys.excepthook = self._failed
        self._exit = sys.exit
        sys.exit = self._note_exit_code
        atexit.register(self.end)

    def end(self) -> None:
        """The orderly end, once: leaves the other ranks together with them."""
        if self._has_left:
            return
        self._has_left = True
        try:
            if signum := interrupt.received():  # the script caught it
                raise interrupt.Interrupted(signum)
            if not self.complete:
                self._failed(TrainError, TrainError(LEFT_EARLY.format(self.place())), None, self._exit_code)
            self.complete()
            let_others_rest()
        except BaseException as error:  # Python itself would print it, and end with 0
            self._failed(type(error), error, error.__traceback__)

    def _note_exit_code(self, code: Any = None, /) -> NoReturn:
        """Python gives the exit code to no `atexit` function, which has to end the process with it."""
        self._exit_code = code if isinstance(code, int) and code % 256 else 1
        self._exit(code)

    def _failed(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None, exit_code: int = 1
    ) -> NoReturn:
        self._has_left = True
        if sys.__stderr__:  # torch keeps what a hook prints until it returns, and this one never does
            sys.stderr = sys.__stderr__
        if isinstance(error, interrupt.Interrupted):
            self.metrics.end("interrupted", str(error))
            sys.stderr.write(f"interrupted by {error}: {self.place()}\n")
            interrupt.leave(128 + error.signum)
        if isinstance(error, TrainError):
            self.metrics.end("failed", str(error))
            sys.stderr.write("".join(f"error: {line}\n" for line in str(error).splitlines()))
        else:
            self.metrics.end("failed", traceback.format_exception_only(kind, error)[-1].strip().splitlines()[0][:300])
            traceback.print_exception(kind, error, where)
        interrupt.leave(exit_code)
