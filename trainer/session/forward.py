"""The network as a training loop calls it: `outputs = Forward(lambda: network, precision, settings.amp)(inputs)`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from trainer.compute.precision import DTYPES, Full
from trainer.data.batch import mapped


class Forward:
    """Forward in the precision of the run (`amp`); what comes of it is in 32 bits again, as losses want it. On the last
    stage of a pipeline it is that stage's part.

    network: gives the one of now. Exact first updates have another than those that follow. failing: torch's errors are
    raised again in it, since ranks may meet in a forward pass.
    """

    def __init__(
        self,
        network: Callable[[], Callable[..., Any]],
        precision: Full,
        amp: str,
        failing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._network, self._precision, self._amp, self._failing = network, precision, amp, failing

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        try:
            return self._forward(inputs, named)
        except RuntimeError:
            with self._failing():
                raise

    def _forward(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._amp == "none":
            return self._network()(*inputs, **named)
        with self._precision.autocast():
            outputs = self._network()(*inputs, **named)
        return mapped(outputs, _widened)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype in DTYPES.values() else tensor
