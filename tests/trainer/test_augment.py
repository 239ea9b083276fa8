"""Augmentation: drawn by sample alone, and the same pixels one by one with PIL and for a whole batch at once."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import functional

from tests.support.trainer_ranks import real_mnist
from trainer.data import AUGMENTATIONS, Augmentation, fixed_point, gather, random_words
from trainer.data.augment import MAX_DEGREES, MAX_SCALE

AFFINE, CROP_FLIP = AUGMENTATIONS["affine"], AUGMENTATIONS["crop_flip"]
assert AFFINE
assert CROP_FLIP


def at_once(augment: Augmentation, pixels: Tensor, parameters: Tensor) -> Tensor:
    maps = fixed_point(augment.maps(parameters, *pixels.shape[2:]))
    return gather(torch.nn.functional.pad(pixels, (1, 1, 1, 1)), maps)


def one_by_one(augment: Augmentation, pixels: Tensor, parameters: Tensor) -> Tensor:
    images = [functional.to_pil_image(image) for image in pixels]
    varied = [augment.picture(image, row) for image, row in zip(images, parameters, strict=True)]
    return torch.stack([functional.pil_to_tensor(image) for image in varied])


def random_pixels(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def wide_affine(samples: int, height: int, width: int) -> Tensor:
    """Turned by any angle, moved by up to half the image, scaled by 0.4 to 2: far beyond what is drawn for training."""
    u = torch.rand((samples, 4), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    half = torch.tensor([width // 2, height // 2])
    shift = ((2 * u[:, 1:3] - 1) * half).round()
    return torch.cat([360 * u[:, :1] - 180, shift, 0.4 + 1.6 * u[:, 3:]], dim=1)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 20, 33)])
def test_a_batch_is_turned_moved_and_scaled_to_the_pixels_that_pil_gives(shape: Any) -> None:
    pixels = random_pixels(200, *shape)
    for parameters in (wide_affine(200, *shape[1:]), AFFINE.draw(0, 0, torch.arange(200), *shape[1:])):
        got, expected = at_once(AFFINE, pixels, parameters), one_by_one(AFFINE, pixels, parameters)
        assert (got == expected).double().mean() >= 0.999
        assert (got != pixels).double().mean() > 0.1


@pytest.mark.skipif(real_mnist() is None, reason="no MNIST; set ORCH_TEST_MNIST to the folder that holds MNIST/raw")
def test_real_digits_are_varied_to_the_pixels_that_pil_gives() -> None:
    packed = (real_mnist() or Path()) / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    pixels = torch.frombuffer(bytearray(gzip.decompress(packed.read_bytes())), dtype=torch.uint8, offset=16)
    pixels = pixels.view(-1, 1, 28, 28)[:1000]
    for augment in (AFFINE, CROP_FLIP):
        parameters = augment.draw(7, 3, torch.arange(1000), 28, 28)
        differing = at_once(augment, pixels, parameters) != one_by_one(augment, pixels, parameters)
        assert differing.double().mean() <= (0.001 if augment is AFFINE else 0)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 9, 14)])
def test_a_batch_is_cut_and_flipped_to_exactly_pils_pixels(shape: Any) -> None:
    pixels = random_pixels(300, *shape)
    parameters = CROP_FLIP.draw(0, 0, torch.arange(300), *shape[1:])
    assert [sorted(set(column)) for column in parameters.T.tolist()] == [[*range(9)], [*range(9)], [0, 1]]
    assert torch.equal(at_once(CROP_FLIP, pixels, parameters), one_by_one(CROP_FLIP, pixels, parameters))


def splitmix64(position: int) -> int:
    """As its authors state it, on unsigned words."""
    mask = (1 << 64) - 1
    word = position * 0x9E3779B97F4A7C15 & mask
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
    return word ^ word >> 31


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**32 - 1), max_size=20))
@settings(max_examples=50)
def test_random_words_are_splitmix64s_by_position(key: int, counters: list[int]) -> None:
    words = random_words(key, torch.tensor(counters, dtype=torch.long))
    assert [word % (1 << 64) for word in words.tolist()] == [splitmix64((key << 32) + number) for number in counters]


def test_the_first_words_of_key_0_are_the_known_ones_of_seed_0() -> None:
    words = random_words(0, torch.arange(1, 4))
    assert [hex(word % (1 << 64)) for word in words.tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_what_is_drawn_for_a_sample_depends_on_no_other_sample() -> None:
    together = AFFINE.draw(5, 2, torch.arange(1000), 28, 28)
    assert torch.equal(AFFINE.draw(5, 2, torch.tensor([977, 3]), 28, 28), together[[977, 3]])
    for seed, epoch in ((6, 2), (5, 3)):
        assert (AFFINE.draw(seed, epoch, torch.arange(1000), 28, 28) == together).double().mean() < 0.2


def test_affine_parameters_fill_their_ranges_evenly() -> None:
    angle, right, down, scale = AFFINE.draw(0, 0, torch.arange(20_000), 28, 28).unbind(1)
    for value, low, high in ((angle, -MAX_DEGREES, MAX_DEGREES), (scale, 1 - MAX_SCALE, 1 + MAX_SCALE)):
        counts = torch.histc((value - low) / (high - low), bins=10, min=0, max=1)
        assert counts.sum() == 20_000
        assert (counts / 2000 - 1).abs().max() < 0.15
    for value in (right, down):
        numbers, counts = value.unique(return_counts=True)
        assert numbers.tolist() == [-2, -1, 0, 1, 2]
        assert (counts / 4000 - 1).abs().max() < 0.15
    assert torch.corrcoef(torch.stack([angle, right, down, scale])).fill_diagonal_(0).abs().max() < 0.03
