"""The network as a training loop calls it: `outputs = Forward(lambda: network, precision, settings.amp)(inputs)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.compute.precision import DTYPES, Full
from trainer.data.batch import mapped


class Forward:
    """Forward in the precision of the run (`amp`); what comes of it is in 32 bits again, as losses want it. On the last
    stage of a pipeline it is that stage's part.

    network: gives the one of now. Exact first updates have another than those that follow.
    """

    def __init__(self, network: Callable[[], Callable[..., Any]], precision: Full, amp: str) -> None:
        self._network, self._precision, self._amp = network, precision, amp

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self._amp == "none":
            return self._network()(*inputs, **named)
        with self._precision.autocast():
            outputs = self._network()(*inputs, **named)
        return mapped(outputs, _widened)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype in DTYPES.values() else tensor
