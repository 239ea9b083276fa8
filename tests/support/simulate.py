"""Plays steps out message by message under a clock of its own: what `forecast` says in closed form, once more. Pure.

    simulate_step_ms(job, hosts, wire, Way("ddp"), shares=(128, 128))        the length of a step once all runs evenly

Each rank is a small program: it computes, and sends and receives in the rounds of each collective. A message takes its
sender's uplink and its receiver's downlink for as long as its bytes need there; links serve one message after another,
in the order in which they were asked. Nothing is random: the same input gives the same answer, bit for bit.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import trainer.shared.gpu_work as gpu_work
from orchestrator.forecast import (
    FLOAT_BYTES,
    Bucket,
    HostSpeed,
    LinkCosts,
    Way,
    Workload,
    averaging,
    buckets_of,
    cast_s,
    compress_s,
    copies_s,
    fitted_mib,
    gradient_bytes,
    meetings_of,
    parts_of,
    release_ms,
    sent_of,
    wire_bytes,
)
from orchestrator.forecast.step import speeds_of
from trainer.shared import STRATEGIES, Speed

Message = tuple[int, int, float]
"""From a rank, to a rank, bytes."""
Round = tuple[Message, ...]
"""What is under way at once. Whoever takes part goes on when its own messages of it have left and arrived."""


@dataclass(frozen=True)
class Leg:
    """work_s: what every rank does by itself before, compute_s: what each rank does besides; called: whether it is a
    collective, with what a call costs.
    """

    rounds: tuple[Round, ...] = ()
    work_s: float = 0.0
    compute_s: tuple[float, ...] = ()
    called: bool = True


@dataclass(frozen=True)
class Transfer:
    """One sum of gradients, or part of one. ready: by rank, the time in a step at which it can begin there. Each rank
    has one thread for each leg, so that the next transfer enters the first while this one is in the second; but a
    blocking transfer waits for the whole of the one before.
    """

    ready_s: tuple[float, ...]
    legs: tuple[Leg, ...]
    blocking: bool = True


def simulate_step_ms(
    job: Workload, hosts: Sequence[HostSpeed], wire: LinkCosts, way: Way, shares: Sequence[int], steps: int = 3
) -> float:
    """Mean length of the steps after the first. Two ranks at least."""
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


def swap(sizes_bytes: Sequence[float]) -> Leg:
    ranks = range(len(sizes_bytes))
    return Leg((tuple((a, b, sizes_bytes[a]) for a in ranks for b in ranks if a != b and sizes_bytes[a]),))


def tree_broadcast(ranks: int, size_bytes: float) -> Iterator[Round]:
    """Those who have it give it to as many others, in each round."""
    have = 1
    while have < ranks:
        yield tuple((rank, rank + have, size_bytes) for rank in range(min(have, ranks - have)))
        have *= 2


def sum_legs(wire: LinkCosts, size_bytes: float) -> tuple[Leg, ...]:
    """As `Wire.sum_legs_s` counts them."""
    if not (wire.costs.relays and wire.is_shared):
        return (Leg(tuple(all_reduce(wire.ranks, size_bytes))),)
    first, hosts = 0, list[range]()
    for site in wire.sites:
        hosts.append(range(first, first + site.ranks))
        first += site.ranks
    inward = [_inside(host, (*ring(len(host), len(host) - 1, size_bytes / len(host)),
                             *gather(len(host), size_bytes / len(host)))) for host in hosts]  # fmt: skip
    outward = [_inside(host, tree_broadcast(len(host), size_bytes)) for host in hosts]
    heads = [host[0] for host in hosts]
    between = tuple(tuple((heads[a], heads[b], size) for a, b, size in r) for r in all_reduce(len(hosts), size_bytes))
    return Leg(_together(inward), called=False), Leg(between), Leg(_together(outward), called=False)


def _inside(host: range, rounds: Iterable[Round]) -> list[Round]:
    return [tuple((host[a], host[b], size) for a, b, size in messages) for messages in rounds] if len(host) > 1 else []


def _together(of_hosts: Sequence[Sequence[Round]]) -> tuple[Round, ...]:
    """All hosts' first rounds at once, then their second ones."""
    return tuple(tuple(itertools.chain(*rounds)) for rounds in itertools.zip_longest(*of_hosts, fillvalue=()))


def collectives_of(wire: LinkCosts, strategy: str, size_bytes: float) -> tuple[Leg, ...]:
    """What a strategy calls with all gradients in one buffer."""
    ranks, piece = wire.ranks, size_bytes / wire.ranks
    half_ring = tuple(ring(ranks, ranks - 1, piece))
    calls: dict[str, Iterable[Round]] = {
        "reduce_scatter": half_ring,
        "all_gather_pieces": half_ring,
        "reduce": (*half_ring, *gather(ranks, piece)),
        "broadcast": tree_broadcast(ranks, size_bytes),
        "gather": gather(ranks, size_bytes),
        "scatter": scatter(ranks, size_bytes),
        "all_gather": ring(ranks, ranks - 1, size_bytes),
    }
    names = STRATEGIES[strategy].collectives
    return sum_legs(wire, size_bytes) if names == ("sum",) else tuple(Leg(tuple(calls[name])) for name in names)


def _transfers(
    job: Workload, hosts: Sequence[HostSpeed], wire: LinkCosts, way: Way, shares: Sequence[int]
) -> Iterator[Transfer]:
    """In the order in which every rank takes part in them."""
    speeds = speeds_of(hosts, way.local_batch)
    if way.strategy == "tensor":
        yield _sliced(job, speeds, wire, way, shares)
        return
    ends_s = tuple(speed.step_ms(samples) / 1000 for speed, samples in zip(speeds, shares, strict=True))
    if way.fidelity == "local":
        yield from _averaged(job, wire, way, ends_s)
    elif way.fidelity == "compressed":
        thin = sum_legs(wire, wire_bytes(job, way) / 2)
        work = Leg(work_s=compress_s(job, wire, way.rank), called=False)
        yield Transfer(ends_s, (work, *thin, *thin))
    elif way.strategy == "ddp":
        micro = [speed.micro_batches(samples) for speed, samples in zip(speeds, shares, strict=True)]
        for bucket in buckets_of(job.layers, way.bucket_mib or fitted_mib(job, wire, way)):
            ready_s = tuple(release_ms(*rank, bucket.ready) for rank in zip(ends_s, micro, strict=True))
            yield Transfer(ready_s, _bucket(bucket, wire, way), blocking=False)
    elif way.strategy == "allreduce":
        yield from _each(job, wire, way, ends_s)
    else:
        yield _at_once(job, wire, way, ends_s)


def _sliced(job: Workload, speeds: Sequence[Speed], wire: LinkCosts, way: Way, shares: Sequence[int]) -> Transfer:
    """Layer after layer: all compute, then send their channels to all others, or add up."""
    legs: list[Leg] = []
    for meeting in meetings_of(job.layers, speeds, shares, parts_of(job, speeds), sent_of(way)):
        work = Leg(work_s=cast_s(meeting, wire), compute_s=meeting.own_s, called=False)
        legs += [work, *([swap(meeting.parts_bytes)] if meeting.parts_bytes else sum_legs(wire, meeting.sum_bytes))]
    return Transfer((0.0,) * wire.ranks, tuple(legs))


def _averaged(job: Workload, wire: LinkCosts, way: Way, ends_s: tuple[float, ...]) -> Iterator[Transfer]:
    """A round of local steps. Where they overlap, it begins as the ways leave."""
    steps_s = tuple(way.every * end_s for end_s in ends_s)
    average = _at_once(job, wire, averaging(way), steps_s)
    if not way.overlap:
        yield average
        return
    leave_s, arrive_s = copies_s(job, wire, averaging(way))
    cast = Leg(work_s=average.legs[0].work_s - leave_s, called=False)
    yield Transfer((0.0,) * len(ends_s), (Leg(work_s=leave_s, called=False), cast, *average.legs[1:-1], cast))
    meanwhile_s = tuple(leave_s + way.overlap * end_s for end_s in ends_s)
    after_s = tuple((way.every - way.overlap) * end_s for end_s in ends_s)
    yield Transfer(meanwhile_s, (Leg(work_s=arrive_s, compute_s=after_s, called=False),))


def _bucket(bucket: Bucket, wire: LinkCosts, way: Way) -> tuple[Leg, ...]:
    if way.fidelity != "half":
        return sum_legs(wire, bucket.bytes)
    cast = Leg(work_s=wire.costs.work_s(gpu_work.cast(bucket.bytes)), called=False)
    return cast, *sum_legs(wire, bucket.bytes / 2), cast


def _each(job: Workload, wire: LinkCosts, way: Way, ends_s: tuple[float, ...]) -> Iterator[Transfer]:
    """One collective a tensor."""
    part = 0.5 if way.fidelity == "half" else 1.0
    for layer in job.layers:
        for shape in layer.shapes:
            size = FLOAT_BYTES * prod(shape)
            casts_s = 2 * wire.costs.work_s(gpu_work.cast(size)) if way.fidelity == "half" else 0.0
            yield Transfer(ends_s, (Leg(work_s=casts_s, called=False), *sum_legs(wire, part * size)))


def _at_once(job: Workload, wire: LinkCosts, way: Way, ends_s: tuple[float, ...]) -> Transfer:
    """All gradients in one buffer, by one collective or two."""
    whole = gradient_bytes(job.layers)
    half = way.fidelity == "half" or way.half_wire
    cast_s = wire.costs.work_s(gpu_work.cast(whole)) if half else 0.0
    before, after = (Leg(work_s=side_s + cast_s, called=False) for side_s in copies_s(job, wire, way))
    return Transfer(ends_s, (before, *collectives_of(wire, way.strategy, whole / 2 if half else whole), after))


# ---- the play -------------------------------------------------------------------------------------------------------

Key = tuple[int, ...]
"""Step, transfer and leg, then the rank that is through with it; or a round of it, or THERE, and the rank."""
THERE = -1
Program = Generator["float | Key", None, None]
"""What a rank's thread does next: it gives the time until which it is busy, or what it waits for."""


class _Play:
    """now_s is the clock; `due` what happens when, in the order of times and, at one time, of requests."""

    def __init__(self, wire: LinkCosts, transfers: Sequence[Transfer], steps: int) -> None:
        self.wire, self.transfers, self.steps = wire, transfers, steps
        self.now_s = 0.0
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.up_s = dict.fromkeys((site.name for site in wire.sites), 0.0)
        self.down_s = dict(self.up_s)
        self.held: defaultdict[Key, list[Callable[[], None]]] = defaultdict(list)
        self.missing: Counter[Key] = Counter()
        self.reached: set[Key] = set()
        self.waiting: defaultdict[Key, list[Program]] = defaultdict(list)
        self.began_s: dict[tuple[int, int], float] = {}
        self.ends = [0.0] * steps

    def run(self) -> list[float]:
        """When the last rank ended each step."""
        for leg in range(max(len(transfer.legs) for transfer in self.transfers)):
            for rank in range(self.wire.ranks):
                self._at(0.0, partial(self._go_on, self._thread(rank, leg)))
        while self.due:
            self.now_s, _, happens = heapq.heappop(self.due)
            happens()
        return self.ends

    def _at(self, time_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self.due, (time_s, next(self.order), happens))

    def _go_on(self, program: Program) -> None:
        wants = next(program, None)
        while isinstance(wants, tuple) and wants in self.reached:
            wants = next(program, None)
        if isinstance(wants, tuple):
            self.waiting[wants].append(program)
        elif wants is not None:
            self._at(max(wants, self.now_s), partial(self._go_on, program))

    def _reach(self, key: Key) -> None:
        self.reached.add(key)
        for program in self.waiting.pop(key, ()):
            self._go_on(program)

    def _thread(self, rank: int, leg: int) -> Program:
        for step in range(self.steps):
            for which, transfer in enumerate(self.transfers):
                if leg < len(transfer.legs):
                    yield from self._begin(rank, leg, step, which)
                    own_s = transfer.legs[leg].compute_s
                    yield self.now_s + transfer.legs[leg].work_s + (own_s[rank] if own_s else 0.0)
                    yield from self._exchange(rank, transfer.legs[leg].rounds, (step, which, leg))
                    yield self.now_s + self.wire.costs.call_s * transfer.legs[leg].called
                    self._reach((step, which, leg, rank))
                    self.ends[step] = max(self.ends[step], self.now_s)

    def _begin(self, rank: int, leg: int, step: int, which: int) -> Program:
        """A leg with the end of the one before it; a step with the end of the step before."""
        last = len(self.transfers) - 1
        if leg:
            yield (step, which, leg - 1, rank)
            return
        if which == 0:
            if step:
                yield (step - 1, last, len(self.transfers[last].legs) - 1, rank)
            self.began_s[rank, step] = self.now_s
        elif self.transfers[which].blocking:
            yield (step, which - 1, len(self.transfers[which - 1].legs) - 1, rank)
        yield self.began_s[rank, step] + self.transfers[which].ready_s[rank]

    def _exchange(self, rank: int, rounds: Sequence[Round], place: tuple[int, int, int]) -> Program:
        """Nothing is sent to a rank before it takes part: as Gloo and NCCL have it, its buffer has to be there."""
        here = (*place, THERE, rank)
        self.reached.add(here)
        for send in self.held.pop(here, ()):
            send()
        for number, messages in enumerate(rounds):
            key = (*place, number, rank)
            for message in messages:
                if message[0] == rank:
                    there = (*place, THERE, message[1])
                    send = partial(self._send, key, message)
                    send() if there in self.reached else self.held[there].append(send)
            self.missing[key] += sum((message[0] == rank) + (message[1] == rank) for message in messages)
            if self.missing[key]:
                yield key

    def _send(self, key: Key, message: Message) -> None:
        source, target, size = message
        costs, a, b = self.wire.costs, self.wire.site_of[source], self.wire.site_of[target]
        left, came = partial(self._count, key), partial(self._count, (*key[:-1], target))
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
        """One message less that a rank waits for in a round; it may have come before the rank."""
        self.missing[key] -= 1
        if self.missing[key] == 0:
            self._reach(key)
