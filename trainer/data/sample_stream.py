"""The sample stream: which samples each update uses, and which of them belong to a rank.

    >>> stream = SampleStream(size=60_000, batch=64, shares=(40, 24), seed=0)
    >>> len(stream.indices(epoch=0, step=937, rank=1))      # of the last batch, which has 32
    12

An update's samples do not depend on the number of ranks. Nothing is padded or repeated.
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
    """32 bits: torch's CPU generator ignores higher bits."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


@dataclass(frozen=True)
class Probes:
    """Ranks without a share take PROBED samples in one of `every` updates."""

    # Scheduled by number, so that every rank can prepare its batch in advance.

    ranks: tuple[int, ...]
    every: int


NO_PROBES = Probes((), 1)


@dataclass(frozen=True)
class SampleStream:
    size: int
    batch: int
    shares: Sequence[int]
    """They sum to `batch`."""
    seed: int
    pairs: bool = False
    """No rank may get a single sample."""
    probes: Probes = NO_PROBES

    @cached_property
    def steps(self) -> int:
        """Updates per epoch."""
        return -(-self.size // self.batch)

    def batch_at(self, step: int) -> int:
        """Over all ranks; the last step may be short."""
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
        """[] if the rank's share is 0."""
        order = self.permutation(epoch)
        for step in range(first_step, self.steps):
            yield self._cut(order, epoch, step, rank)

    def _cut(self, order: list[int], epoch: int, step: int, rank: int) -> list[int]:
        shares = self.shares_at(step, epoch)
        begin = step * self.batch + sum(shares[:rank])
        return order[begin : begin + shares[rank]]


class RankBatches(Sampler[list[tuple[int, int]]]):
    """This rank's (epoch, index) pairs of each step. Set `epoch` before each epoch, and `first_step` to continue one.

    steps: None for all.
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
        """This rank's share of a full batch."""
        return self.stream.shares[self.rank]

    def reshare(self, shares: Sequence[int], probes: Probes = NO_PROBES) -> None:
        """Takes effect when iteration next begins."""
        self.stream = replace(self.stream, shares=tuple(shares), probes=probes)

    def indices(self) -> Iterator[list[int]]:
        return itertools.islice(self.stream.epoch_of_rank(self.epoch, self.rank, self.first_step), len(self))

    def first(self, steps: int) -> RankBatches:
        """An independent sampler of the epoch's first steps."""
        batches = RankBatches(self.stream, self.rank, steps)
        batches.epoch = self.epoch
        return batches
