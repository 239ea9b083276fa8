"""Data-parallel training under torchrun that records where the time of every step went.

    torchrun --standalone --nproc-per-node 2 -m trainer --exp mnist_lenet --epochs 1

A script can join with its own network, data, loss and loop:

    run = trainer.join(batch=256, epochs=10).prepare(model, optimizer, train_set)
    for epoch in run.epochs():
        for inputs, targets in run.batches():
            run.step(loss_sum(run.model(inputs), targets))
        run.evaluate(judge, test_set)

`shared` imports no torch.
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
    # Imports torch only when a name needs it.
    if name not in _LIES_IN:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LIES_IN[name]), name)
