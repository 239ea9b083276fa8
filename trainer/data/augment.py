"""Random variations of training images, drawn by sample: the same ones for every loader and any number of ranks.

    >>> augment = AUGMENTATIONS["affine"]
    >>> parameters = augment.draw(0, 0, torch.tensor([7, 8]), 28, 28)
    >>> parameters.shape                                    # a row for each sample, here of epoch 0 with seed 0
    torch.Size([2, 4])

`augment.picture(image, parameters[0])` makes one PIL image; `augment.maps(parameters, 28, 28)` is what a whole batch
takes at once, see `resident`.

A sample's numbers follow from (seed, epoch, sample index) alone, so that what a model sees depends neither on how a
batch is split nor on the processes that load it.
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
"""`affine`: turned by so much either way, moved by whole pixels up to a tenth of the image, scaled by 0.9 to 1.1."""
MARGIN = 4
"""`crop_flip`: the black border added all around, of which the image's own size is cut out again."""

_GOLDEN, _MIX1, _MIX2 = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Augmentation:
    """How one kind of variation is drawn and applied.

    from_uniform: numbers in [0, 1) (samples, draws) and the image's height and width to parameters (samples, draws)
    picture: a PIL image and its row of parameters to the varied image
    maps: the same as affine maps (samples, 6), float64: output pixel (x, y) shows the input at
          (m0 x + m1 y + m2, m3 x + m4 y + m5), both measured from the image's corner; black where that lies outside
    """

    draws: int
    from_uniform: Callable[[Tensor, int, int], Tensor]
    picture: Callable[[Any, Tensor], Any]
    maps: Callable[[Tensor, int, int], Tensor]

    def draw(self, seed: int, epoch: int, indices: Tensor, height: int, width: int) -> Tensor:
        """The parameters of samples (n,) int64, one row each, on the device of `indices`."""
        counters = indices[:, None] * self.draws + torch.arange(self.draws, device=indices.device)
        words = random_words(derive_seed("augment", seed, epoch), counters)
        return self.from_uniform(_shift_right(words, 11).double() * 2.0**-53, height, width)


def random_words(key: int, counters: Tensor) -> Tensor:
    """64 random bits for each counter below 2**32: any of them, in any order, all at once. key: below 2**32.

    SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014; constants as in Vigna's
    splitmix64.c) used by position: the x-th number of its sequence is a bijection of x, which here holds the key in its
    upper half, the counter in its lower one. int64 wraps as uint64 does.
    """
    upper = key << 32
    word = (counters + (upper - (1 << 64) if upper >> 63 else upper)) * _GOLDEN
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        word = (word ^ _shift_right(word, shift)) * factor
    return word ^ _shift_right(word, 31)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """Zeros come in from the left, as for an unsigned word."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _affine_parameters(u: Tensor, height: int, width: int) -> Tensor:
    """Degrees, pixels to the right and down, scale."""
    centred = 2 * u - 1
    limit = torch.tensor([int(MAX_SHIFT * width), int(MAX_SHIFT * height)], dtype=u.dtype, device=u.device)
    shift = (u[:, 1:3] * (2 * limit + 1)).floor() - limit
    return torch.cat([centred[:, :1] * MAX_DEGREES, shift, 1 + centred[:, 3:] * MAX_SCALE], dim=1)


def _affine_picture(image: Any, row: Tensor) -> Any:
    angle, right, down, scale = row.tolist()
    return functional.affine(image, angle, [int(right), int(down)], scale, [0.0, 0.0])


def _affine_maps(parameters: Tensor, height: int, width: int) -> Tensor:
    """Back from the output: the shift undone, then, about the image's middle, the turn and the scale."""
    angle, right, down, scale = parameters.unbind(1)
    cos, sin = angle.deg2rad().cos() / scale, angle.deg2rad().sin() / scale
    x, y = width / 2, height / 2
    from_x, from_y = -x - right, -y - down
    columns = [cos, sin, cos * from_x + sin * from_y + x, -sin, cos, cos * from_y - sin * from_x + y]
    return torch.stack(columns, dim=1)


def _crop_flip_parameters(u: Tensor, height: int, width: int) -> Tensor:
    """Left and top edge of the cut within the image with its border; 1 where it is flipped after that."""
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


# A batch of any form: tensors, with the samples along their first dimension, in tuples, lists and mappings.
#
# >>> batch = {"image": torch.zeros(5, 3), "label": torch.arange(5), "name": ["a", "b", "c", "d", "e"]}
# >>> [part["name"] for part in pieces(batch, [3, 2])]
# [['a', 'b', 'c'], ['d', 'e']]
# >>> mapped(batch, lambda tensor: tensor.double())["label"].dtype
# torch.float64


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
