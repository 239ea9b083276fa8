"""Who does a strategy's work on numbers: this device, or nobody, where a rank stands in for a GPU. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from trainer.shared.gpu_work import Work


class Executor:
    """Does it. What it would take a GPU is for those alone who keep that time instead (`standin.StandInExecutor`)."""

    def __call__(self, work: Work, arithmetic: Callable[[], object]) -> None:
        arithmetic()

    def beside(self) -> Executor:
        """Another one, whose work runs beside this one's: each thread has its own."""
        return self


ON_DEVICE = Executor()
