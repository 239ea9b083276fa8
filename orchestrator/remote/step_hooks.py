"""What is hung into torch so that the steps of a script that nobody changed are measured.

    install(torch)              once, when torch has been imported and before the script goes on

Four places are watched, and nothing that they compute is touched: a batch that is asked of a DataLoader, a call of
DistributedDataParallel, a backward, and an optimiser's step. The end of a rank's own backward is known from a callback
that the autograd engine runs when the last gradient is there, before DistributedDataParallel's own, which waits for the
exchange. Where anything goes wrong here, the watching ends, in one line on standard error, and the script goes on.

What they note is looked at later (`step_watch`): amid a network's data every line of Python is a slow one.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from . import step_watch
from .step_course import Source
from .step_watch import ASKS, BACKWARD, CALLS, ENDS, GETS, STEP, Watch

SOURCE = "_orch_source"
"""The attribute of a loader's iterator by which it is known again."""


def install(torch: Any) -> None:
    watch = Watch(torch, os.environ)
    if not watch.is_on:
        return
    step_watch.current = watch
    # Whether torch.compile reads the code that calls: what it makes of it is to have no marks.
    is_traced = getattr(getattr(torch, "compiler", None), "is_compiling", None) or (lambda: False)
    _watch_optimizers(watch, is_traced)
    _watch_loaders(torch, watch)
    _watch_backward(torch, watch, is_traced)
    if torch.distributed.is_available():
        _watch_network(torch, watch, is_traced)


def _watch_optimizers(watch: Watch, is_traced: Callable[[], bool]) -> None:
    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_traced() and watch.is_on:
            watch.note(STEP, weakref.ref(optimizer), time.time())

    # `torch.optim` hides the module's name.
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(after_step)


def _watch_loaders(torch: Any, watch: Watch) -> None:
    iterator, tensor = torch.utils.data.dataloader._BaseDataLoaderIter, torch.Tensor
    give = iterator.__next__

    @functools.wraps(give)
    def watched_next(self: Any) -> Any:
        if not watch.is_on:
            return give(self)
        source = self.__dict__.get(SOURCE)
        if source is None:
            self.__dict__[SOURCE] = source = Source()
        watch.note(ASKS, source)
        try:
            batch = give(self)
        except StopIteration:
            watch.note(ENDS, source)
            raise
        watch.note(GETS, source, samples_of(batch, tensor))
        return batch

    iterator.__next__ = watched_next


def _watch_network(torch: Any, watch: Watch, is_traced: Callable[[], bool]) -> None:
    ddp, tensor, wants_gradients = torch.nn.parallel.DistributedDataParallel, torch.Tensor, torch.is_grad_enabled
    forward = ddp.forward

    @functools.wraps(forward)
    def watched_forward(self: Any, *inputs: Any, **named: Any) -> Any:
        if not is_traced() and watch.is_on and wants_gradients():
            watch.network = self.module.__class__.__name__
            watch.note(CALLS, samples_of((inputs, named), tensor), self.require_backward_grad_sync)
        return forward(self, *inputs, **named)

    ddp.forward = watched_forward


def _watch_backward(torch: Any, watch: Watch, is_traced: Callable[[], bool]) -> None:
    backward, queue = torch.autograd.backward, torch.autograd.Variable._execution_engine.queue_callback
    within = False
    """Whether another backward is being made: one of a checkpoint lies within it."""

    @functools.wraps(backward)
    def watched_backward(*args: Any, **named: Any) -> Any:
        nonlocal within
        if is_traced() or within or not watch.is_on:
            return backward(*args, **named)
        within, computed = True, _mark_of_end(watch, queue, args[0] if args else named.get("tensors"))
        try:
            result = backward(*args, **named)
        finally:
            within = False
        watch.note(BACKWARD, computed[0] if computed else None)
        return result

    torch.autograd.backward = watched_backward


def _mark_of_end(watch: Watch, queue: Callable[..., None], tensors: Any) -> list[Any]:
    """Where the mark of the last gradient is laid by the backward that begins at these tensors."""
    marks: list[Any] = []

    def begins(gradients: Any) -> None:
        """Within the backward, in whichever thread: what is queued first is called first."""
        try:
            queue(lambda: marks.append(watch.mark()))
        except Exception as error:
            watch.end(error)

    try:
        first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        if root := getattr(first, "grad_fn", None):
            root.register_prehook(begins)
    except Exception as error:
        watch.end(error)
    return marks


# How many samples lie in what a loader gave, or a network was called with: the first dimension of the first tensor.
#
# samples_of([images, labels], Tensor)          32
# samples_of({"input_ids": ids}, Tensor)        8

DEPTH = 4
"""So deep may the tensor lie in lists and mappings."""


def samples_of(batch: Any, tensor: type, depth: int = DEPTH) -> int | None:
    """None where it holds no tensor, or one without dimensions. tensor: torch's type of them."""
    if isinstance(batch, tensor):
        shape: Any = batch.shape  # type: ignore[attr-defined]
        return int(shape[0]) if len(shape) else None
    if not depth:
        return None
    if isinstance(batch, Mapping):
        parts: Any = batch.values()
    else:
        parts = batch if isinstance(batch, (list, tuple)) else ()
    return next((found for part in parts if (found := samples_of(part, tensor, depth - 1)) is not None), None)
