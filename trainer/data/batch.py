"""A batch of any form: tensors, with the samples along their first dimension, in tuples, lists and mappings.

>>> batch = {"image": torch.zeros(5, 3), "label": torch.arange(5), "name": ["a", "b", "c", "d", "e"]}
>>> [part["name"] for part in pieces(batch, [3, 2])]
[['a', 'b', 'c'], ['d', 'e']]
>>> mapped(batch, lambda tensor: tensor.double())["label"].dtype
torch.float64
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.shared.errors import TrainError


def mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same form with each tensor changed; what is no tensor stays."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return _with(batch, {key: mapped(value, change) for key, value in batch.items()})
    if isinstance(batch, (tuple, list)):
        return _like(batch, [mapped(value, change) for value in batch])
    return batch


def tensors_of(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return [tensor for value in batch for tensor in tensors_of(value)] if isinstance(batch, (tuple, list)) else []


def moved(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu" and not torch.cuda.is_initialized():
        return batch  # this process has tensors nowhere else
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))


def pieces(batch: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """The batch in parts of so many samples, which add up to all of them. Raises TrainError as `cut` does."""
    if len(sizes) == 1:
        yield batch
        return
    begin = 0
    for size in sizes:
        yield cut(batch, begin, begin + size)
        begin += size


def cut(batch: Any, begin: int, end: int) -> Any:
    """Samples begin to end, without the last. Raises TrainError for what may hold samples that it cannot see."""
    if isinstance(batch, Tensor):
        return batch[begin:end]
    if isinstance(batch, Mapping):
        return _with(batch, {key: cut(value, begin, end) for key, value in batch.items()})
    if isinstance(batch, (tuple, list)):
        if batch and all(isinstance(value, (str, bytes)) for value in batch):
            return batch[begin:end]  # a name for each sample
        return _like(batch, [cut(value, begin, end) for value in batch])
    if batch is None or isinstance(batch, (str, bytes, int, float)):
        return batch  # of all samples alike
    raise TrainError(
        f"a batch is cut into micro-batches, and holds a {type(batch).__name__}: let `collate` give tensors, in "
        "tuples, lists and dictionaries"
    )


def start_of(processes: int) -> str | None:
    """How a DataLoader starts so many: they are forked, as by default before Python 3.14, unless the script has chosen
    another way, since a process that begins anew runs a script without a guard once more.
    """
    return "fork" if processes and multiprocessing.get_start_method(allow_none=True) is None else None


def _like(batch: Any, values: list[Any]) -> Any:
    """A list, a tuple or a named tuple."""
    if hasattr(batch, "_fields"):
        return type(batch)(*values)
    return type(batch)(values)


def _with(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A dictionary, or one of another kind that may be written to, as tokenizers give it."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    changed = copy.copy(batch)
    changed.update(values)
    return changed
