"""Batches of a script's own map-style data set. Random numbers depend only on (seed, epoch, sample)."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainer.data.augment import cut, start_of
from trainer.data.sample_stream import RankBatches, derive_seed
from trainer.shared.errors import TrainError

Collate = Callable[[list[Any]], Any]


class Named(Dataset[Any]):
    """The samples by (epoch, index)."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, name: tuple[int, int]) -> Any:
        return self.__getitems__([name])[0]

    def __getitems__(self, names: Sequence[tuple[int, int]]) -> list[Any]:
        loaded = []
        with undisturbed() as seed:
            for epoch, index in names:
                seed(derive_seed("sample", self.seed, epoch, index))
                loaded.append(self.dataset[index])
        return loaded


@contextlib.contextmanager
def undisturbed() -> Iterator[Callable[[int], None]]:
    """Yields a function that seeds all generators; restores their states."""
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()

    def seed(number: int) -> None:
        torch.default_generator.manual_seed(number)
        random.seed(number)
        if numpy:
            numpy.random.seed(number)

    try:
        yield seed
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(states[2])


def collate_or_none(samples: list[Any], collate: Collate, example: Any) -> Any:
    """example: cut to length 0 if there are no samples. Returns None if that fails."""
    if samples:
        return collate(samples)
    with contextlib.suppress(TrainError):
        return cut(example, 0, 0)
    return None


class ScriptBatches:
    """This rank's batches of an epoch; empty if its share is 0."""

    def __init__(
        self, dataset: Any, order: RankBatches, seed: int, collate: Collate, processes: int, device: torch.device
    ) -> None:
        self.device = device
        example = collate([dataset[0]])
        self.loader: DataLoader[Any] = DataLoader(
            Named(dataset, seed),
            batch_sampler=order,
            num_workers=processes,
            # Persistent workers would keep the data set of their start.
            persistent_workers=processes > 0 and not hasattr(dataset, "set_epoch"),
            multiprocessing_context=start_of(processes),
            collate_fn=partial(collate_or_none, collate=collate, example=example),
            pin_memory=device.type == "cuda",
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def judged_batches(dataset: Any, indices: range, batch: int, collate: Collate, processes: int) -> Iterator[Any]:
    names = [list(indices[begin : begin + batch]) for begin in range(0, len(indices), batch)]
    started: dict[str, Any] = {"num_workers": processes, "multiprocessing_context": start_of(processes)}
    return iter(DataLoader(dataset, batch_sampler=names, collate_fn=collate, **started))
