"""The `resident` loader: keeps the whole data set on the device and varies a batch at once.

Augmentation gathers bytes at positions in the 16.16 fixed point of PIL's nearest neighbour, so both loaders give equal
bytes. (grid_sample takes several times as long and breaks ties differently.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.data.augment import Augmentation
from trainer.data.sample_stream import RankBatches
from trainer.shared.experiments import DataSet

Batch = tuple[Tensor, Tensor]
Job = Callable[[], list[Batch]]
Ahead = Callable[[Iterable[Job]], Iterator[list[Batch]]]
"""Runs jobs in order and yields their results."""

PREPARED_BYTES = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Images prepared together: a core's cache, or few calls on a GPU."""


class ResidentSet:
    """pixels: uint8 (samples, channels, height, width). Kept with a black margin, for everything outside."""

    def __init__(self, pixels: Tensor, labels: Tensor, facts: DataSet, device: torch.device) -> None:
        self.pixels = pad(pixels, (1, 1, 1, 1)).to(device)
        self.labels = labels.to(device)
        self.mean, self.std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (facts.mean, facts.std))

    def images(self, indices: Tensor, maps: Tensor | None = None) -> Tensor:
        """maps: from `fixed_point`."""
        pixels = self.pixels.index_select(0, indices)
        pixels = pixels[:, :, 1:-1, 1:-1] if maps is None else gather(pixels, maps)
        # The operations of ToTensor and Normalize in their order, so that both loaders give equal floats.
        return pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255).sub_(self.mean).div_(self.std)


def fixed_point(maps: Tensor) -> Tensor:
    """Affine maps (samples, 6) from the centre of the first pixel, in 1/65536."""
    maps = maps.view(-1, 2, 3)
    start = maps[:, :, 2] + 0.5 * maps[:, :, 0] + 0.5 * maps[:, :, 1]
    return (torch.stack([maps[:, :, 0], maps[:, :, 1], start], dim=2) * 65536 + 0.5).floor().to(torch.int32)


def gather(pixels: Tensor, maps: Tensor) -> Tensor:
    """pixels: uint8 (batch, channels, height, width) with margin. maps: int32 (batch, 2, 3); output pixel (x, y) shows
    the input at (m0 x + m1 y + m2) / 65536.
    """
    batch, channels, rows, columns = pixels.shape
    height, width = rows - 2, columns - 2
    integer = torch.int32 if pixels.numel() < 1 << 31 else torch.int64
    place = _inputs(maps[:, 1], height, width, height).to(integer).mul_(columns)
    place.add_(_inputs(maps[:, 0], height, width, width))
    plane = torch.arange(batch * channels, dtype=integer, device=pixels.device) * (rows * columns) + (columns + 1)
    place = place.unsqueeze(1) + plane.view(batch, channels, 1, 1)
    return pixels.view(-1).index_select(0, place.view(-1)).view(batch, channels, height, width)


def _inputs(maps: Tensor, height: int, width: int, size: int) -> Tensor:
    """The input column (or row) of each output pixel, -1 or `size` outside."""
    steps = torch.arange(max(height, width), dtype=torch.int32, device=maps.device)
    along_row = maps[:, 0:1] * steps[:width]
    down = maps[:, 1:2] * steps[:height] + maps[:, 2:3]
    return (down.unsqueeze(2) + along_row.unsqueeze(1)).bitwise_right_shift_(16).clamp_(-1, size)


class ResidentBatches:
    def __init__(
        self, data: ResidentSet, order: RankBatches, augment: Augmentation | None, seed: int, ahead: Ahead
    ) -> None:
        self.data, self.order, self.augment, self.seed, self.ahead = data, order, augment, seed, ahead

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        steps = list(self.order.indices())
        chosen = torch.tensor(
            [index for step in steps for index in step], dtype=torch.long, device=self.data.labels.device
        )
        maps = self._maps(chosen)
        for batches in self.ahead(self._jobs([len(step) for step in steps], chosen, maps)):
            yield from batches

    def _maps(self, chosen: Tensor) -> Tensor | None:
        if self.augment is None:
            return None
        size = [length - 2 for length in self.data.pixels.shape[2:]]
        return fixed_point(self.augment.maps(self.augment.draw(self.seed, self.order.epoch, chosen, *size), *size))

    def _jobs(self, sizes: list[int], chosen: Tensor, maps: Tensor | None) -> Iterator[Job]:
        """Groups of steps prepared together."""
        limit = PREPARED_BYTES[self.data.labels.device.type] // (4 * self.data.pixels[0].numel())
        begin, group = 0, []
        for number, size in enumerate(sizes):
            group.append(size)
            if number + 1 == len(sizes) or sum(group) + sizes[number + 1] > limit:
                end = begin + sum(group)
                yield self._job(group, chosen[begin:end], None if maps is None else maps[begin:end])
                begin, group = end, []

    def _job(self, sizes: list[int], chosen: Tensor, maps: Tensor | None) -> Job:
        def prepare() -> list[Batch]:
            images, labels = self.data.images(chosen, maps), self.data.labels.index_select(0, chosen)
            return list(zip(images.split(sizes), labels.split(sizes), strict=True))

        return prepare


def test_batches(data: ResidentSet, indices: range, batch: int) -> Iterator[Batch]:
    for begin in range(0, len(indices), batch):
        chosen = torch.tensor(indices[begin : begin + batch], device=data.labels.device)
        yield data.images(chosen), data.labels.index_select(0, chosen)


# ---------------------------------------------------------------------------------------------------------------------


def in_turn(jobs: Iterable[Job]) -> Iterator[list[Batch]]:
    for job in jobs:
        yield job()


def in_thread(jobs: Iterable[Job]) -> Iterator[list[Batch]]:
    """One job ahead in a thread, which ends with the iteration."""
    with ThreadPoolExecutor(1, "next-batch") as thread:
        coming = None
        for job in jobs:
            done, coming = coming, thread.submit(job)
            if done:
                yield done.result()
        if coming:
            yield coming.result()


def in_stream(jobs: Iterable[Job]) -> Iterator[list[Batch]]:
    """One job ahead in another CUDA stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    coming: tuple[list[Batch], torch.cuda.Event] | None = None
    try:
        for job in jobs:
            with torch.cuda.stream(side):
                done, coming = coming, (job(), side.record_event())
            if done:
                yield _take_over(*done)
        if coming:
            yield _take_over(*coming)
    finally:  # memory that a job still reads must not be overwritten
        torch.cuda.current_stream().wait_stream(side)


def _take_over(batches: list[Batch], prepared: torch.cuda.Event) -> list[Batch]:
    # The computing stream waits for the batches, and the allocator keeps them for it.
    computing = torch.cuda.current_stream()
    computing.wait_event(prepared)
    for batch in batches:
        for tensor in batch:
            tensor.record_stream(computing)
    return batches
