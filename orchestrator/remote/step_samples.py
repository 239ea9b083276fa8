"""How many samples lie in what a loader gave, or a network was called with: the first dimension of the first tensor.

samples_of([images, labels], Tensor)          32
samples_of({"input_ids": ids}, Tensor)        8
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
