"""The sample stream: which samples make up each update, and which of them are a rank's own.

    >>> stream = SampleStream(size=60_000, batch=64, shares=(40, 24), seed=0)
    >>> len(stream.indices(epoch=0, step=937, rank=1))      # rank 1's part of the short last batch, of 32
    12

There is one permutation of all samples for each (seed, epoch), whatever the number of ranks. Step s owns positions
[s*batch, (s+1)*batch) of it, cut among the ranks by the running sum of their shares. So the samples of an update do
not depend on how it is split, and a run on any cluster can be compared with one process (which, where the network has
BatchNorm, takes the ranks' parts one after the other). Nothing is padded or repeated.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.utils.data import Sampler

from trainer.shared.shares import PROBED, scale_shares, with_samples, without_singles


def derive_seed(*parts: int | str) -> int:
    """A seed for each combination of parts. 32 bits, since torch's CPU generator ignores all higher ones."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


@dataclass(frozen=True)
class Probes:
    """These ranks, which have no share, take PROBED samples in one of `every` updates, from whoever has most. Every
    rank knows which update that is before it prepares its batch.
    """

    ranks: tuple[int, ...]
    every: int


NO_PROBES = Probes((), 1)


@dataclass(frozen=True)
class SampleStream:
    """How the samples of an epoch go to the ranks."""

    size: int
    batch: int
    shares: Sequence[int]
    """Samples of a full batch for each rank; they add up to `batch`."""
    seed: int
    pairs: bool = False
    """Whether no rank may get a single sample, not even of a short batch."""
    probes: Probes = NO_PROBES

    @cached_property
    def steps(self) -> int:
        """Updates of one epoch."""
        return -(-self.size // self.batch)

    def batch_at(self, step: int) -> int:
        """Samples of an epoch's step over all ranks: `batch`, or what is left for the last one."""
        return min(self.batch, self.size - step * self.batch)

    def is_probe(self, update: int) -> bool:
        """update: of the whole run."""
        if not self.probes.ranks:
            return False
        is_whole = self.batch_at(update % self.steps) == self.batch
        return is_whole and update % self.probes.every == 0

    def shares_at(self, step: int, epoch: int = 0) -> tuple[int, ...]:
        if self.is_probe(epoch * self.steps + step):
            return with_samples(tuple(self.shares), self.probes.ranks, PROBED)
        batch = self.batch_at(step)
        return self._of_full_batch if batch == self.batch else self._of_batch(batch)

    @cached_property
    def _of_full_batch(self) -> tuple[int, ...]:
        """Known from the first one on: each step asks for it."""
        return self._of_batch(self.batch)

    def _of_batch(self, samples: int) -> tuple[int, ...]:
        shares = scale_shares(self.shares, samples)
        return without_singles(shares) if self.pairs else shares

    def permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
        return torch.randperm(self.size, generator=generator).tolist()

    def indices(self, epoch: int, step: int, rank: int) -> list[int]:
        return self._cut(self.permutation(epoch), epoch, step, rank)

    def epoch_of_rank(self, epoch: int, rank: int, first_step: int = 0) -> Iterator[list[int]]:
        """The rank's samples of each step of an epoch; an empty list where its share is 0."""
        order = self.permutation(epoch)
        for step in range(first_step, self.steps):
            yield self._cut(order, epoch, step, rank)

    def _cut(self, order: list[int], epoch: int, step: int, rank: int) -> list[int]:
        shares = self.shares_at(step, epoch)
        begin = step * self.batch + sum(shares[:rank])
        return order[begin : begin + shares[rank]]


class RankBatches(Sampler[list[tuple[int, int]]]):
    """A batch sampler for DataLoader: the rank's own (epoch, index) pairs of each step. Set `epoch` before, and
    `first_step` for an epoch that was interrupted.

    steps: the first so many alone; None: to the epoch's end.
    """

    def __init__(self, stream: SampleStream, rank: int, steps: int | None = None) -> None:
        self.stream = stream
        self.rank = rank
        self.steps = steps
        self.epoch = 0
        self.first_step = 0

    def __len__(self) -> int:
        return min(self.stream.steps, self.steps or self.stream.steps) - self.first_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices in self.indices():
            yield [(self.epoch, index) for index in indices]

    @property
    def share(self) -> int:
        """The rank's, of a full batch."""
        return self.stream.shares[self.rank]

    def reshare(self, shares: Sequence[int], probes: Probes = NO_PROBES) -> None:
        """From the next time on that batches are drawn from the beginning, or from a `first_step`."""
        self.stream = replace(self.stream, shares=tuple(shares), probes=probes)

    def indices(self) -> Iterator[list[int]]:
        """The same without the epoch."""
        return itertools.islice(self.stream.epoch_of_rank(self.epoch, self.rank, self.first_step), len(self))

    def first(self, steps: int) -> RankBatches:
        """The same epoch's first steps by themselves, as it is cut now, however far this one has been drawn."""
        batches = RankBatches(self.stream, self.rank, steps)
        batches.epoch = self.epoch
        return batches
