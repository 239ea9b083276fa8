"""Random image augmentation that depends only on (seed, epoch, sample index), for any loader and number of ranks.

`picture` varies one PIL image, `maps` a whole batch (`resident`).
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import functional

from trainer.data.sample_stream import derive_seed
from trainer.shared.errors import TrainError

MAX_DEGREES, MAX_SHIFT, MAX_SCALE = 10.0, 0.1, 0.1
"""`affine`: degrees, part of the image, change of scale."""
MARGIN = 4
"""`crop_flip`: pixels of black border around the image before the crop."""

_GOLDEN, _MIX1, _MIX2 = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Augmentation:
    """from_uniform: numbers in [0, 1) (samples, draws), height and width to parameters (samples, draws) picture: a PIL
    image and its parameters to the varied image maps: parameters to affine maps (samples, 6), float64: output pixel (x,
    y) shows the input at
          (m0 x + m1 y + m2, m3 x + m4 y + m5), from the image's corner; black outside
    """

    draws: int
    from_uniform: Callable[[Tensor, int, int], Tensor]
    picture: Callable[[Any, Tensor], Any]
    maps: Callable[[Tensor, int, int], Tensor]

    def draw(self, seed: int, epoch: int, indices: Tensor, height: int, width: int) -> Tensor:
        """A row of parameters per sample. indices: (n,) int64."""
        counters = indices[:, None] * self.draws + torch.arange(self.draws, device=indices.device)
        words = random_words(derive_seed("augment", seed, epoch), counters)
        return self.from_uniform(_shift_right(words, 11).double() * 2.0**-53, height, width)


def random_words(key: int, counters: Tensor) -> Tensor:
    """64 random bits per counter. key, counters: below 2**32.

    SplitMix64 (Steele, Lea and Flood 2014; constants of Vigna's splitmix64.c) at position key << 32 | counter.
    """
    # int64 wraps like uint64.
    upper = key << 32
    word = (counters + (upper - (1 << 64) if upper >> 63 else upper)) * _GOLDEN
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        word = (word ^ _shift_right(word, shift)) * factor
    return word ^ _shift_right(word, 31)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _affine_parameters(u: Tensor, height: int, width: int) -> Tensor:
    """Degrees, pixels right, pixels down, scale."""
    centred = 2 * u - 1
    limit = torch.tensor([int(MAX_SHIFT * width), int(MAX_SHIFT * height)], dtype=u.dtype, device=u.device)
    shift = (u[:, 1:3] * (2 * limit + 1)).floor() - limit
    return torch.cat([centred[:, :1] * MAX_DEGREES, shift, 1 + centred[:, 3:] * MAX_SCALE], dim=1)


def _affine_picture(image: Any, row: Tensor) -> Any:
    angle, right, down, scale = row.tolist()
    return functional.affine(image, angle, [int(right), int(down)], scale, [0.0, 0.0])


def _affine_maps(parameters: Tensor, height: int, width: int) -> Tensor:
    """The inverse: undoes the shift, then rotation and scale around the centre."""
    angle, right, down, scale = parameters.unbind(1)
    cos, sin = angle.deg2rad().cos() / scale, angle.deg2rad().sin() / scale
    x, y = width / 2, height / 2
    from_x, from_y = -x - right, -y - down
    columns = [cos, sin, cos * from_x + sin * from_y + x, -sin, cos, cos * from_y - sin * from_x + y]
    return torch.stack(columns, dim=1)


def _crop_flip_parameters(u: Tensor, height: int, width: int) -> Tensor:
    """Left and top edge of the crop; 1 to flip it."""
    return torch.cat([(u[:, :2] * (2 * MARGIN + 1)).floor(), (u[:, 2:] * 2).floor()], dim=1)


def _crop_flip_picture(image: Any, row: Tensor) -> Any:
    left, top, flip = (int(value) for value in row.tolist())
    width, height = image.size
    cut = functional.crop(functional.pad(image, [MARGIN]), top, left, height, width)
    return functional.hflip(cut) if flip else cut


def _crop_flip_maps(parameters: Tensor, height: int, width: int) -> Tensor:
    left, top, flip = parameters.unbind(1)
    zero, one = torch.zeros_like(left), torch.ones_like(left)
    return torch.stack([1 - 2 * flip, zero, left - MARGIN + flip * width, zero, one, top - MARGIN], dim=1)


AUGMENTATIONS = {
    "none": None,
    "affine": Augmentation(4, _affine_parameters, _affine_picture, _affine_maps),
    "crop_flip": Augmentation(3, _crop_flip_parameters, _crop_flip_picture, _crop_flip_maps),
}


# Batches of any form: tensors (samples first) in tuples, lists and mappings.


def mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
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
    """Raises TrainError as `cut` does."""
    if len(sizes) == 1:
        yield batch
        return
    begin = 0
    for size in sizes:
        yield cut(batch, begin, begin + size)
        begin += size


def cut(batch: Any, begin: int, end: int) -> Any:
    """Raises TrainError for an unknown type."""
    if isinstance(batch, Tensor):
        return batch[begin:end]
    if isinstance(batch, Mapping):
        return _with(batch, {key: cut(value, begin, end) for key, value in batch.items()})
    if isinstance(batch, (tuple, list)):
        if batch and all(isinstance(value, (str, bytes)) for value in batch):
            return batch[begin:end]  # a name for each sample
        return _like(batch, [cut(value, begin, end) for value in batch])
    if batch is None or isinstance(batch, (str, bytes, int, float)):
        return batch  # applies to all samples
    raise TrainError(
        f"a batch is cut into micro-batches, and holds a {type(batch).__name__}: let `collate` give tensors, in "
        "tuples, lists and dictionaries"
    )


def start_of(processes: int) -> str | None:
    """The start method of DataLoader processes: fork, unless the script has chosen another."""
    # Python 3.14's default would run a script without a main guard again.
    return "fork" if processes and multiprocessing.get_start_method(allow_none=True) is None else None


def _like(batch: Any, values: list[Any]) -> Any:
    if hasattr(batch, "_fields"):
        return type(batch)(*values)
    return type(batch)(values)


def _with(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    changed = copy.copy(batch)
    changed.update(values)
    return changed
