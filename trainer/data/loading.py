"""Opens the batches: `resident` if the data set fits into memory, otherwise `workers`, with equal results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from trainer.data import resident
from trainer.data.augment import AUGMENTATIONS, Augmentation, start_of
from trainer.data.fetch import folder, prepare
from trainer.data.resident import in_stream
from trainer.data.sample_stream import RankBatches
from trainer.data.sets import find_facts, known_facts, open_data, open_text, whole
from trainer.data.text import TextBatches
from trainer.ranks.agreement import gather_lines, together
from trainer.ranks.rank_info import RankInfo
from trainer.shared.errors import TrainError
from trainer.shared.experiments import DataSet
from trainer.shared.settings import Settings
from trainer.shared.shares import scale_shares

Batch = tuple[Tensor, Tensor]
Batches = Iterable[Batch]


class Opened(NamedTuple):
    train: Batches
    """Batches of the current epoch."""
    test: Callable[[], Batches] | None
    """Opens this rank's test batches for an evaluation; None if paced."""
    again: Callable[[RankBatches], Batches]
    """Batches of another order, independent of `train`."""


_PART_OF_MEMORY = 0.25
SHOWN = 3
"""Names in a message."""
_COUNTED = ("classes", "train_samples", "test_samples", "bytes_per_token")


def agree_on_facts(settings: Settings, info: RankInfo) -> DataSet:
    """A collective call. Raises TrainError if folders differ between hosts."""
    # A paced rank has no data: it takes the others' counts.
    own = ""
    if settings.vocabulary:
        with together(info.node):  # one rank per host trains the vocabulary, and keeps it for the others
            if info.local_rank == 0 and info.learns:
                find_facts(settings)
    with together(info.node):
        if info.learns:
            facts, mark = find_facts(settings)
            own = json.dumps([info.node, mark, *(getattr(facts, name) for name in _COUNTED)])
            if facts.is_text and info.rank == 0:
                _report_left_out(open_text(settings).left_out)
    found = [json.loads(line) for line in gather_lines(own) if line]
    if not found:
        return known_facts(settings)
    node, *first = found[0]
    for other, *counted in found:
        if counted != first:
            raise TrainError(_difference(settings, (node, first[0]), (other, counted[0])))
    return dataclasses.replace(settings.data_set, **dict(zip(_COUNTED, first[1:], strict=True)))


def _report_left_out(names: Sequence[str]) -> None:
    if names:
        some = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        print(f"warning: {some}: not UTF-8, so not read; convert to UTF-8 (iconv) to train on it", flush=True)


def _difference(settings: Settings, one: tuple[str, str], other: tuple[str, str]) -> str:
    """one, other: a node, and the mark of its data."""
    between, marks = f"differ between {one[0]} and {other[0]}", [one[1].split(), other[1].split()]
    if marks[0] != marks[1] and marks[0][0] == marks[1][0]:
        return (
            f"vocabulary: the tokens {between}, although the text is the same: install one version of tokenizers on "
            f"both, and delete {folder(settings)}/.orch-bpe-* there"
        )
    return f"the files in {folder(settings)} {between}: bring the same to all"


def choose_loader(settings: Settings, facts: DataSet, info: RankInfo, device: torch.device) -> Settings:
    """Sets `loader` and `num_workers` for this host. Raises TrainError if the set cannot be resident."""
    if not info.learns:
        return settings
    if facts.is_text:
        return dataclasses.replace(settings, loader="resident", num_workers=0)
    loader = settings.loader
    if loader != "workers":
        needed, free = resident_bytes(facts) * ranks_on(device, info), free_bytes(device)
        if loader == "resident" and needed > free:
            raise TrainError(
                f"{info.node}: the data set takes {needed / 2**30:.1f} GiB on {device}, and {free / 2**30:.1f} GiB are "
                "free: use loader=workers"
            )
        loader = "resident" if loader == "resident" or needed <= _PART_OF_MEMORY * free else "workers"
    processes = loader_processes(settings.num_workers, info, device) if loader == "workers" else 0
    return dataclasses.replace(settings, loader=loader, num_workers=processes)


def resident_bytes(facts: DataSet) -> int:
    return (facts.train_samples + facts.test_samples) * (math.prod(facts.shape) + 8)


def ranks_on(device: torch.device, info: RankInfo) -> int:
    """How many ranks hold a copy in the same memory."""
    return info.local_world_size if device.type == "cpu" else -(-info.local_world_size // torch.cuda.device_count())


def free_bytes(device: torch.device) -> int:
    """Memory that is free without swapping and within the cgroup's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
        return int(min(free, _cgroup_bytes()))
    return 0


def _cgroup_bytes() -> float:
    """Memory left in the cgroup (version 2); infinite without a limit."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        name = Path("/proc/self/cgroup").read_text(encoding="utf-8").strip().split("::")[1]
        group = Path("/sys/fs/cgroup", name.lstrip("/"))
        limit, used = ((group / file).read_text(encoding="utf-8").strip() for file in ("memory.max", "memory.current"))
        return int(limit) - int(used)
    return math.inf


def loader_processes(wanted: int, info: RankInfo, device: torch.device) -> int:
    # On a CPU ranks need the cores; more than 4 rarely help.
    if wanted >= 0:
        return wanted
    return 0 if device.type == "cpu" else min(4, len(os.sched_getaffinity(0)) // info.local_world_size)


def open_batches(
    settings: Settings, facts: DataSet, order: RankBatches, info: RankInfo, device: torch.device
) -> Opened:
    """A collective call. Raises TrainError on all ranks if one fails. Paced ranks have blank batches."""
    with together(info.node):  # one rank per host fetches and unpacks
        if info.local_rank == 0 and info.learns:
            prepare(settings)
    with together(info.node):
        if info.learns:
            if facts.is_text:
                return _text(settings, facts, order, device)
            if settings.loader == "resident":
                return _resident(settings, facts, order, device, prepare_ahead(info, device))
            return _workers(settings, facts, order, device)
    return Opened(BlankBatches(order, facts), None, lambda other: BlankBatches(other, facts))


def _text(settings: Settings, facts: DataSet, order: RankBatches, device: torch.device) -> Opened:
    text = open_text(settings)
    train, test = (part.to(device) for part in (text.train, text.test))
    at_once = evaluated_at_once(facts, order)
    return Opened(
        TextBatches(train, settings.tokens, order),
        lambda: text_parts(test, settings.tokens, order, own_part(facts.test_samples, order), at_once),
        lambda other: TextBatches(train, settings.tokens, other),
    )


def text_parts(text: Tensor, tokens: int, order: RankBatches, indices: range, at_once: int) -> Iterator[Batch]:
    batches = TextBatches(text, tokens, order)
    for begin in range(0, len(indices), at_once):
        yield batches.samples(list(indices[begin : begin + at_once]))


def prepare_ahead(info: RankInfo, device: torch.device) -> resident.Ahead:
    # On a CPU a thread only helps if a core is left over for it.
    if device.type == "cuda":
        return resident.in_stream
    cores = len(os.sched_getaffinity(0)) // info.local_world_size
    return resident.in_thread if cores > torch.get_num_threads() else resident.in_turn


def _resident(
    settings: Settings,
    facts: DataSet,
    order: RankBatches,
    device: torch.device,
    ahead: resident.Ahead,
) -> Opened:
    train, test = (
        resident.ResidentSet(*whole(pictures, samples), facts, device)
        for pictures, samples in zip(open_data(settings, facts), (facts.train_samples, facts.test_samples), strict=True)
    )
    how = AUGMENTATIONS[settings.augment], settings.seed
    return Opened(
        resident.ResidentBatches(train, order, *how, ahead),
        lambda: resident.test_batches(test, own_part(facts.test_samples, order), evaluated_at_once(facts, order)),
        lambda other: resident.ResidentBatches(train, other, *how, resident.in_turn),
    )


def _workers(settings: Settings, facts: DataSet, order: RankBatches, device: torch.device) -> Opened:
    pictures, test_pictures = open_data(settings, facts)
    train = Samples(pictures, facts, AUGMENTATIONS[settings.augment], settings.seed)
    test, processes = Samples(test_pictures, facts), settings.num_workers
    return Opened(
        train_batches(train, order, facts.shape, processes, device),
        lambda: test_batches(test, own_part(facts.test_samples, order), evaluated_at_once(facts, order), processes),
        lambda other: train_batches(train, other, facts.shape, processes, device),
    )


def own_part(samples: int, order: RankBatches) -> range:
    """This rank's test samples, in proportion to its share of training."""
    parts = scale_shares(order.stream.shares, samples)
    first = sum(parts[: order.rank])
    return range(first, first + parts[order.rank])


def evaluated_at_once(facts: DataSet, order: RankBatches) -> int:
    """Samples per test batch: the rank's training share, of images at least 1 MiB of pixels."""
    share = order.stream.shares[order.rank]
    # A token's output is as large as the vocabulary.
    return max(1, share) if facts.is_text else max(share, (1 << 20) // math.prod(facts.shape))


# The `workers` loader: images one by one with PIL, in torch's DataLoader.


class Samples(Dataset[tuple[Tensor, int]]):
    """Images by (epoch, index), normalised, and varied if `augment` is set."""

    def __init__(self, pictures: Any, facts: DataSet, augment: Augmentation | None = None, seed: int = 0) -> None:
        self.pictures, self.augment, self.seed, self.size = pictures, augment, seed, facts.shape[1:]
        self.to_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize(facts.mean, facts.std)])

    def __getitem__(self, name: tuple[int, int]) -> tuple[Tensor, int]:
        return self.__getitems__([name])[0]

    def __getitems__(self, names: Sequence[tuple[int, int]]) -> list[tuple[Tensor, int]]:
        # torch's DataLoader asks for a whole batch, so parameters are drawn at once.
        loaded = [self.pictures[index] for _, index in names]
        if self.augment and names:
            indices = torch.tensor([index for _, index in names])
            rows = self.augment.draw(self.seed, names[0][0], indices, *self.size)
            loaded = [
                (self.augment.picture(image, row), label) for (image, label), row in zip(loaded, rows, strict=True)
            ]
        return [(self.to_tensor(image), label) for image, label in loaded]


class WorkerBatches:
    """Shortens a worker's TrainError, which has a traceback, to one line. Copies batches to a GPU ahead."""

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __iter__(self) -> Iterator[Batch]:
        batches = _in_one_line(iter(self.loader))  # starts the processes, and draws their seed, at once
        return batches if self.device.type == "cpu" else _copied(batches, self.device)


def _copied(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Copies from pinned memory in another stream."""

    def copy(batch: Batch) -> list[Batch]:
        images, labels = batch
        return [(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))]

    for (batch,) in in_stream(partial(copy, batch) for batch in batches):
        yield batch


def _in_one_line(batches: Iterator[Batch]) -> Iterator[Batch]:
    try:
        yield from batches
    except TrainError as error:
        line = str(error).splitlines()[-1].partition(f"{TrainError.__name__}: ")
        raise TrainError(line[2] or line[0]) from error


def train_batches(
    samples: Samples, order: RankBatches, shape: tuple[int, ...], num_workers: int, device: torch.device
) -> WorkerBatches:
    """Empty tensors if the share is 0."""
    return WorkerBatches(
        DataLoader(
            samples,
            batch_sampler=order,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            multiprocessing_context=start_of(num_workers),
            collate_fn=partial(collate, shape=shape),
            pin_memory=device.type == "cuda",
        ),
        device,
    )


def test_batches(samples: Samples, indices: range, batch: int, num_workers: int) -> WorkerBatches:
    names = [[(0, index) for index in indices[begin : begin + batch]] for begin in range(0, len(indices), batch)]
    started: dict[str, Any] = {"num_workers": num_workers, "multiprocessing_context": start_of(num_workers)}
    return WorkerBatches(DataLoader(samples, batch_sampler=names, **started), torch.device("cpu"))


def collate(samples: Sequence[tuple[Tensor, int]], shape: tuple[int, ...]) -> Batch:
    if not samples:
        return torch.empty((0, *shape)), torch.empty(0, dtype=torch.long)
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


class BlankBatches:
    """Zeros, for paced ranks."""

    def __init__(self, order: RankBatches, facts: DataSet) -> None:
        self.order, self.facts = order, facts

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        blank = torch.zeros(1)
        stream = self.order.stream
        for step in range(self.order.first_step, stream.steps):
            samples = stream.shares_at(step, self.order.epoch)[self.order.rank]
            labels = torch.zeros(samples, *self.facts.label_shape, dtype=torch.long)
            yield blank.expand(samples, *self.facts.shape), labels
