"""Patches torch so that an unchanged script reports batches, backwards and optimiser steps.

    install(torch)              once, after torch's import and before the script continues

Observes DataLoader batches, DistributedDataParallel calls, losses, backwards and optimiser steps; changes no result. An
autograd callback marks the end of a rank's own backward, before DistributedDataParallel's callback waits for the
exchange. An error ends the measurement with one line on standard error; the script goes on. Notes are evaluated later
(`step_watch`), since Python code here would slow the step.
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
from .step_watch import ASKS, BACKWARD, CALLS, ENDS, GETS, SHARED, SHARES, STEP, Watch

SOURCE = "_orch_source"  # attribute of a loader's iterator
UNSCALED = "_orch_unscaled"  # attribute of a scaled loss


def install(torch: Any) -> None:
    watch = Watch(torch, os.environ)
    if not watch.is_on:
        return
    step_watch.current = watch
    # torch.compile reads our wrappers too; compiled code must not contain marks.
    is_traced = getattr(getattr(torch, "compiler", None), "is_compiling", None) or (lambda: False)
    _watch_optimizers(watch, is_traced)
    _watch_loaders(torch, watch)
    _watch_backward(torch, watch, is_traced)
    _watch_scalers(torch)
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
    forward, share_buffers = ddp.forward, ddp._sync_buffers
    # Ranks wait for each other in each of these layers, out of our sight.
    waiting_layers = torch.nn.SyncBatchNorm
    waits: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # keeps no network alive

    def waits_inside(network: Any) -> bool:
        if network not in waits:
            waits[network] = any(isinstance(module, waiting_layers) for module in network.modules())
        return waits[network]

    @functools.wraps(forward)
    def watched_forward(self: Any, *inputs: Any, **named: Any) -> Any:
        if not is_traced() and watch.is_on and wants_gradients():
            watch.network = self.module.__class__.__name__
            exchanges = self.require_backward_grad_sync and not waits_inside(self.module)
            watch.note(CALLS, samples_of((inputs, named), tensor), exchanges)
        return forward(self, *inputs, **named)

    @functools.wraps(share_buffers)
    def watched_buffers(self: Any, *given: Any, **named: Any) -> Any:
        """Rank 0's buffers, as BatchNorm's statistics: a rank that comes early waits here, before it computes."""
        if is_traced() or not watch.is_on or not wants_gradients():
            return share_buffers(self, *given, **named)
        watch.note(SHARES)
        result = share_buffers(self, *given, **named)
        watch.note(SHARED)
        return result

    ddp.forward, ddp._sync_buffers = watched_forward, watched_buffers


def _watch_backward(torch: Any, watch: Watch, is_traced: Callable[[], bool]) -> None:
    backward, queue = torch.autograd.backward, torch.autograd.Variable._execution_engine.queue_callback
    within = False  # a backward is running; a checkpoint's backward is nested in it

    @functools.wraps(backward)
    def watched_backward(*args: Any, **named: Any) -> Any:
        nonlocal within
        if is_traced() or within or not watch.is_on:
            return backward(*args, **named)
        root = _root_of(args[0] if args else named.get("tensors"))
        loss = _loss_of(root, watch, torch.Tensor)
        within, computed = True, _mark_of_end(watch, queue, root)
        try:
            result = backward(*args, **named)
        finally:
            within = False
        watch.note(BACKWARD, computed[0] if computed else None, loss)
        return result

    torch.autograd.backward = watched_backward


def _root_of(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors


def _loss_of(root: Any, watch: Watch, tensor: type) -> Any:
    """A copy of the scalar whose backward is called: scripts reuse its memory, as by `dist.all_reduce(loss)`."""
    try:
        loss = getattr(root, UNSCALED, root)
        return loss.detach().clone() if isinstance(loss, tensor) and loss.numel() == 1 else None  # type: ignore[attr-defined]
    except Exception as error:
        return watch.end(error)


def _watch_scalers(torch: Any) -> None:
    """A scaler's loss is scaled by up to 65,536: the backward reports the one that it was given."""
    modules = [sys.modules.get("torch.amp.grad_scaler"), sys.modules.get("torch.cuda.amp.grad_scaler")]
    for kind in {found for module in modules if (found := getattr(module, "GradScaler", None))}:
        if "scale" in vars(kind):
            kind.scale = _watched_scale(kind.scale, torch.Tensor)


def _watched_scale(scale: Callable[..., Any], tensor: type) -> Callable[..., Any]:
    @functools.wraps(scale)
    def watched_scale(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if isinstance(outputs, tensor) and scaled is not outputs:
            setattr(scaled, UNSCALED, outputs.detach())  # type: ignore[attr-defined]
        return scaled

    return watched_scale


def _mark_of_end(watch: Watch, queue: Callable[..., None], root: Any) -> list[Any]:
    """A list that gets the mark of the last gradient in the backward from this tensor."""
    marks: list[Any] = []

    def begins(gradients: Any) -> None:
        # Runs within the backward, in any thread; the first queued callback runs first.
        try:
            queue(lambda: marks.append(watch.mark()))
        except Exception as error:
            watch.end(error)

    try:
        if graph := getattr(root, "grad_fn", None):
            graph.register_prehook(begins)
    except Exception as error:
        watch.end(error)
    return marks


#     samples_of([images, labels], Tensor)          32: the first dimension of the first tensor
#     samples_of({"input_ids": ids}, Tensor)        8

DEPTH = 4  # depth of lists and mappings to search


def samples_of(batch: Any, tensor: type, depth: int = DEPTH) -> int | None:
    """None without a tensor, or if it has no dimensions. tensor: torch's type."""
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
