"""The resident loader: batches prepared ahead come in their order, and nothing is left behind when a run ends early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch

from trainer.data import AUGMENTATIONS, RankBatches, SampleStream, resident
from trainer.shared import DATA_SETS

WAYS = [resident.in_turn, resident.in_thread]


def numbered(done: list[int], fails_at: int | None = None) -> Iterable[Callable[[], Any]]:
    def job(number: int) -> Any:
        if number == fails_at:
            raise MemoryError("no room")
        done.append(number)
        return [number]

    return ((lambda number=number: job(number)) for number in range(5))


def helpers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("next-batch")]


@pytest.mark.parametrize("ahead", WAYS)
def test_what_is_prepared_comes_in_order(ahead: Any) -> None:
    assert list(ahead(numbered([]))) == [[number] for number in range(5)]
    assert list(ahead([])) == []
    assert helpers() == []


def test_the_next_batch_is_prepared_while_one_is_used() -> None:
    begun, done = threading.Event(), []
    jobs = [lambda: [0], lambda: [begun.set() or 1], lambda: [done.append(2) or 2]]
    batches = resident.in_thread(jobs)
    assert next(batches) == [0]
    assert begun.wait(10)
    assert done == []  # and no more than one
    batches.close()


@pytest.mark.parametrize("ahead", WAYS)
def test_a_failure_arrives_in_its_place_and_ends_the_thread(ahead: Any) -> None:
    batches = ahead(numbered([], fails_at=2))
    assert [next(batches), next(batches)] == [[0], [1]]
    with pytest.raises(MemoryError, match="no room"):
        next(batches)
    assert helpers() == []


def test_a_loop_that_is_left_early_ends_the_thread() -> None:
    done: list[int] = []
    for _ in resident.in_thread(numbered(done)):
        break
    assert helpers() == []
    assert done == [0, 1]


def test_an_interrupted_loop_ends_the_thread() -> None:
    def interrupted() -> None:
        for _ in resident.in_thread(numbered([])):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert helpers() == []


def batches_of(shares: tuple[int, ...], ahead: Any, device: str = "cpu", augment: str = "affine") -> Any:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8, generator=generator)
    data = resident.ResidentSet(pixels, torch.arange(50) % 10, DATA_SETS["cifar10"], torch.device(device))
    order = RankBatches(SampleStream(50, sum(shares), shares, seed=0), rank=0)
    return resident.ResidentBatches(data, order, AUGMENTATIONS[augment], 0, ahead)


def assert_same(some: Any, others: Any) -> None:
    for (images, labels), (other_images, other_labels) in zip(some, others, strict=True):
        assert torch.equal(images.cpu(), other_images.cpu())
        assert torch.equal(labels.cpu(), other_labels.cpu())


@pytest.mark.parametrize("augment", AUGMENTATIONS)
@pytest.mark.parametrize("shares", [(4,), (3, 5), (0, 8), (64,)])
def test_steps_prepared_together_are_those_prepared_alone(
    monkeypatch: pytest.MonkeyPatch, shares: tuple[int, ...], augment: str
) -> None:
    together = list(batches_of(shares, resident.in_thread, augment=augment))
    monkeypatch.setattr(resident, "PREPARED_BYTES", {"cpu": 1})
    alone = list(batches_of(shares, resident.in_turn, augment=augment))
    assert len(alone) == -(-50 // sum(shares))
    assert len(alone[0][1]) == min(50, shares[0])
    assert_same(together, alone)


def test_a_resumed_epoch_gives_what_was_left_of_it() -> None:
    whole = list(batches_of((8,), resident.in_turn))
    rest = batches_of((8,), resident.in_turn)
    rest.order.first_step = 4
    assert_same(list(rest), whole[4:])


def test_images_are_normalised_as_torchvision_does_to_the_last_bit() -> None:
    from torchvision.transforms import Normalize, functional

    facts = DATA_SETS["cifar10"]
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    data = resident.ResidentSet(pixels, torch.zeros(1), facts, torch.device("cpu"))
    expected = Normalize(facts.mean, facts.std)(functional.to_tensor(functional.to_pil_image(pixels[0])))
    assert torch.equal(data.images(torch.tensor([0]))[0], expected)
