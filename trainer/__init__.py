"""The trainer: data-parallel training under torchrun, with a record of where every step's time went.

    torchrun --standalone --nproc-per-node 2 -m trainer --exp mnist_lenet --epochs 1

A script of one's own takes part with its own network, data, loss and loop:

    run = trainer.join(batch=256, epochs=10).prepare(model, optimizer, train_set)
    for epoch in run.epochs():
        for inputs, targets in run.batches():
            run.step(loss_sum(run.model(inputs), targets))
        run.evaluate(judge, test_set)

It needs the standard library, torch (2.0.1 or newer) and torchvision, and knows nothing of who started it: all it
learns comes through its arguments (`shared.settings`) and torchrun's environment. Nothing in `shared` imports torch, so
that a machine without torch can check settings, split batches and read metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.session.join import Ranks as Ranks
    from trainer.session.join import join as join
    from trainer.session.session import Session as Session
    from trainer.shared.errors import TrainError as TrainError

__all__ = ["Ranks", "Session", "TrainError", "join"]

_LIES_IN = {
    "Ranks": "trainer.session.join",
    "Session": "trainer.session.session",
    "TrainError": "trainer.shared.errors",
    "join": "trainer.session.join",
}


def __getattr__(name: str) -> Any:
    """Imports torch only for who trains."""
    if name not in _LIES_IN:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LIES_IN[name]), name)
