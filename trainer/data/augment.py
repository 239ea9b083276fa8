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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import functional

from trainer.data.sample_stream import derive_seed

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
