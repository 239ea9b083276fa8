"""Plays steps out message by message under a clock of its own: what `forecast` says in closed form, once more. Pure.

    simulate_step_ms(job, hosts, wire, Way("ddp"), shares=(128, 128))        the length of a step once all runs evenly

Each rank is a small program: it computes, and sends and receives in the rounds of each collective. A message takes its
sender's uplink and its receiver's downlink for as long as its bytes need there; links serve one message after another,
in the order in which they were asked. Nothing is random: the same input gives the same answer, bit for bit.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from orchestrator.forecast import Bucket, Host, Job, Way, buckets_of, compressed_bytes, predict, release_ms
from orchestrator.networks import FLOAT_BYTES, gradient_bytes
from orchestrator.wire import Wire

Message = tuple[int, int, float]
"""From a rank, to a rank, bytes."""
Round = tuple[Message, ...]
"""What is under way at once. Whoever takes part goes on when its own messages of it have left and arrived."""


@dataclass(frozen=True)
class Transfer:
    """One collective. ready: by rank, the time in a step at which it can begin there. work_s: what a rank does to the
    bytes before and again after it.
    """

    ready_s: tuple[float, ...]
    rounds: tuple[Round, ...]
    work_s: float = 0.0


def simulate_step_ms(
    job: Job, hosts: Sequence[Host], wire: Wire, way: Way, shares: Sequence[int], steps: int = 3
) -> float:
    """Mean length of the steps after the first. Two ranks at least; not for hierarchical ways."""
    transfers = tuple(_transfers(job, hosts, wire, way, shares))
    ends = _Play(wire, transfers, steps).run()
    return 1000 * (ends[-1] - ends[0]) / (steps - 1) / way.every


# ---- who sends what to whom -----------------------------------------------------------------------------------------


def ring(ranks: int, rounds: int, size_bytes: float) -> Iterator[Round]:
    for _ in range(rounds):
        yield tuple((rank, (rank + 1) % ranks, size_bytes) for rank in range(ranks))


def all_reduce(ranks: int, size_bytes: float) -> Iterator[Round]:
    return ring(ranks, 2 * (ranks - 1), size_bytes / ranks)


def gather(ranks: int, size_bytes: float) -> Iterator[Round]:
    yield tuple((rank, 0, size_bytes) for rank in range(1, ranks))


def scatter(ranks: int, size_bytes: float) -> Iterator[Round]:
    yield tuple((0, rank, size_bytes) for rank in range(1, ranks))


def tree_broadcast(ranks: int, size_bytes: float) -> Iterator[Round]:
    """Those who have it give it to as many others, in each round."""
    have = 1
    while have < ranks:
        yield tuple((rank, rank + have, size_bytes) for rank in range(min(have, ranks - have)))
        have *= 2


def collectives_of(strategy: str, ranks: int, size_bytes: float) -> tuple[tuple[Round, ...], ...]:
    """The rounds of each collective that a strategy calls with all gradients in one buffer."""
    piece = size_bytes / ranks
    half_ring = tuple(ring(ranks, ranks - 1, piece))
    calls: dict[str, tuple[Iterable[Round], ...]] = {
        "allreduce_flat": (all_reduce(ranks, size_bytes),),
        "parameter_average": (all_reduce(ranks, size_bytes),),
        "reduce_scatter": (half_ring, half_ring),
        "reduce_broadcast": ((*half_ring, *gather(ranks, piece)), tree_broadcast(ranks, size_bytes)),
        "gather_scatter": (gather(ranks, size_bytes), scatter(ranks, size_bytes)),
        "allgather": (ring(ranks, ranks - 1, size_bytes),),
    }
    return tuple(tuple(rounds) for rounds in calls[strategy])


def _transfers(job: Job, hosts: Sequence[Host], wire: Wire, way: Way, shares: Sequence[int]) -> Iterator[Transfer]:
    """In the order in which every rank takes part in them."""
    speeds = [speed for host in hosts for speed in host.speeds]
    ends_s = tuple(speed.step_ms(samples) / 1000 for speed, samples in zip(speeds, shares, strict=True))
    if way.fidelity == "local":
        steps = predict(job, hosts, wire, way, shares).local_steps
        ends_s = tuple(count * end_s for count, end_s in zip(steps, ends_s, strict=True))
        yield from _at_once(job, wire, Way("parameter_average"), ends_s)
    elif way.strategy == "ddp":
        micro = [speed.micro_batches(samples) for speed, samples in zip(speeds, shares, strict=True)]
        for bucket in buckets_of(job.layers, way.bucket_mib):
            ready_s = tuple(release_ms(*rank, bucket.ready) for rank in zip(ends_s, micro, strict=True))
            yield from _bucket(bucket, wire, way, ready_s)
    elif way.strategy == "allreduce":
        yield from _each(job, wire, way, ends_s)
    else:
        yield from _at_once(job, wire, way, ends_s)


def _bucket(bucket: Bucket, wire: Wire, way: Way, ready_s: tuple[float, ...]) -> Iterator[Transfer]:
    costs = wire.costs
    if way.fidelity == "compressed":
        thin = tuple(all_reduce(wire.ranks, compressed_bytes(bucket.shapes, way.rank)))
        yield Transfer(ready_s, thin, bucket.bytes / costs.compress_bytes_per_s / 2)
        yield from [Transfer(ready_s, tuple(all_reduce(wire.ranks, 0)))] * 2
    elif way.fidelity == "half":
        rounds = tuple(all_reduce(wire.ranks, bucket.bytes / 2))
        yield Transfer(ready_s, rounds, bucket.bytes / costs.cast_bytes_per_s)
    else:
        yield Transfer(ready_s, tuple(all_reduce(wire.ranks, bucket.bytes)))


def _each(job: Job, wire: Wire, way: Way, ends_s: tuple[float, ...]) -> Iterator[Transfer]:
    """One collective a tensor."""
    part = 0.5 if way.fidelity == "half" else 1.0
    for layer in job.layers:
        for shape in layer.shapes:
            size = FLOAT_BYTES * prod(shape)
            work_s = size / wire.costs.cast_bytes_per_s if way.fidelity == "half" else 0.0
            yield Transfer(ends_s, tuple(all_reduce(wire.ranks, part * size)), work_s)


def _at_once(job: Job, wire: Wire, way: Way, ends_s: tuple[float, ...]) -> Iterator[Transfer]:
    """All gradients in one buffer, by one collective or two."""
    costs, whole, half = wire.costs, gradient_bytes(job.layers), way.fidelity == "half"
    copies = 2 + (wire.ranks if way.strategy in ("gather_scatter", "allgather") else 0)
    work_s = copies * whole / costs.copy_bytes_per_s + (2 * whole / costs.cast_bytes_per_s if half else 0.0)
    calls = collectives_of(way.strategy, wire.ranks, whole / 2 if half else whole)
    for rounds in calls:
        yield Transfer(ends_s, rounds, work_s / 2 / len(calls))


# ---- the play -------------------------------------------------------------------------------------------------------

Program = Generator[float, None, None]
"""What a rank does next; it gives the time until which it is busy, FOREVER when it waits for others."""
FOREVER = math.inf
Key = tuple[int, int, int, int]
"""Step, transfer, round and rank."""


class _Play:
    """now_s is the clock; `due` what happens when, in the order of times and, at one time, of requests."""

    def __init__(self, wire: Wire, transfers: Sequence[Transfer], steps: int) -> None:
        self.wire, self.transfers, self.steps = wire, transfers, steps
        self.now_s = 0.0
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.up_s = dict.fromkeys((site.name for site in wire.sites), 0.0)
        self.down_s = dict(self.up_s)
        self.entered: set[tuple[int, int, int]] = set()
        self.held: defaultdict[tuple[int, int, int], list[Callable[[], None]]] = defaultdict(list)
        self.done: Counter[Key] = Counter()
        self.awaited: dict[Key, int] = {}
        self.ends = [0.0] * steps
        self.programs = [self._program(rank) for rank in range(wire.ranks)]

    def run(self) -> list[float]:
        """When the last rank ended each step."""
        for rank in range(self.wire.ranks):
            self._at(0.0, partial(self._go_on, rank))
        while self.due:
            self.now_s, _, happens = heapq.heappop(self.due)
            happens()
        return self.ends

    def _at(self, time_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self.due, (time_s, next(self.order), happens))

    def _go_on(self, rank: int) -> None:
        until_s = next(self.programs[rank], FOREVER)
        if until_s < FOREVER:
            self._at(max(until_s, self.now_s), partial(self._go_on, rank))

    def _program(self, rank: int) -> Program:
        for step in range(self.steps):
            began_s = self.now_s
            for which, transfer in enumerate(self.transfers):
                yield began_s + transfer.ready_s[rank]
                yield self.now_s + transfer.work_s
                self._enter((step, which, rank))
                for number, messages in enumerate(transfer.rounds):
                    yield from self._take_part(rank, messages, (step, which, number, rank))
                yield self.now_s + transfer.work_s + self.wire.costs.call_s
            self.ends[step] = max(self.ends[step], self.now_s)

    def _enter(self, place: tuple[int, int, int]) -> None:
        """Nothing is sent to a rank before it takes part: as Gloo and NCCL have it, its buffer has to be there."""
        self.entered.add(place)
        for send in self.held.pop(place, ()):
            send()

    def _take_part(self, rank: int, messages: Round, key: Key) -> Program:
        """Until all that this rank sends has left and all that it gets has come."""
        for message in messages:
            if message[0] == rank:
                place = (*key[:2], message[1])
                send = partial(self._send, key, message)
                send() if place in self.entered else self.held[place].append(send)
        missing = sum((message[0] == rank) + (message[1] == rank) for message in messages)
        if self.done[key] < missing:
            self.awaited[key] = missing
            yield FOREVER

    def _send(self, key: Key, message: Message) -> None:
        source, target, size = message
        costs, a, b = self.wire.costs, self.wire.site_of[source], self.wire.site_of[target]
        left, came = partial(self._count, key), partial(self._count, (*key[:3], target))
        if a is b:
            there_s = self.now_s + costs.local_message_s + 8 * size / costs.local_bps
            self._at(there_s, left)
            self._at(there_s, came)
            return
        begins_s = max(self.now_s, self.up_s[a.name], self.down_s[b.name])
        self.up_s[a.name] = begins_s + costs.message_s + 8 * size / a.up_bps
        self.down_s[b.name] = begins_s + costs.message_s + 8 * size / b.down_bps
        self._at(self.up_s[a.name], left)
        self._at(begins_s + costs.message_s + 8 * size / self.wire.path_bps(a, b), came)

    def _count(self, key: Key) -> None:
        self.done[key] += 1
        if self.done[key] == self.awaited.get(key):
            del self.awaited[key]
            self._go_on(key[3])
