"""Runs a strategy's arithmetic, or only takes its time if a rank simulates a GPU. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from trainer.shared.gpu_work import Work


class Executor:
    """`standin.StandInExecutor` waits for the predicted time of `work` instead."""

    def __call__(self, work: Work, arithmetic: Callable[[], object]) -> None:
        arithmetic()

    def beside(self) -> Executor:
        return self


ON_DEVICE = Executor()
