"""How a batch is split over ranks: whole samples, nothing lost, nothing twice. Imports no torch.

>>> equal_shares(64, 3)
(22, 21, 21)
>>> scale_shares((22, 21, 21), 10)
(4, 3, 3)

>>> wanted, ranks = parse_shares("v100=5,a2000=2"), (("v100", 0), ("a2000", 0))
>>> choose_shares(wanted, ranks, batch=64)
(46, 18)

>>> v100, a2000 = Speed(fixed_ms=2, sample_ms=1.2), Speed(fixed_ms=3, sample_ms=3)
>>> fastest_shares((v100, a2000), batch=64)
(46, 18)
>>> round(v100.step_ms(46), 1)
57.2

>>> speeds = parse_speeds("v100:0=2+1.2/512,a2000:0=3+3")
>>> split_batch("measured", speeds, ranks, batch=64)
(46, 18)
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Wanted = Mapping[tuple[str, int | None], int]
"""What is said of each (node, local rank), or of all ranks of a node (None)."""

PROBED = 2
"""Samples that a rank without a share is given now and then, to see how fast it is: the fewest of which BatchNorm can
make something."""
BY_SPEED = ("measured", "auto")
"""Policies that split a batch by how fast each rank is: as it was measured alone; and as it turns out in the run."""
PROFILED = "profiled"
"""The policy where nobody has chosen one: as measured where every rank's speed is known, else equal."""
WORDS = (PROFILED, "equal", *BY_SPEED)


def equal_shares(batch: int, world_size: int) -> tuple[int, ...]:
    """`batch` samples over `world_size` ranks, no two shares further apart than one; the first ranks take the rest."""
    whole, rest = divmod(batch, world_size)
    return tuple(whole + (rank < rest) for rank in range(world_size))


def scale_shares(shares: Sequence[int], batch: int) -> tuple[int, ...]:
    """`batch` samples in the proportion of `shares` (their sum at least 1), by the largest remainder.

    Each share comes out less than one sample from its exact part; a tie goes to the lower rank.
    """
    total = sum(shares)
    if total == batch:  # of all batches but an epoch's last one
        return tuple(shares)
    scaled = [share * batch // total for share in shares]
    remainder = [share * batch % total for share in shares]
    largest_first = sorted(range(len(shares)), key=lambda rank: -remainder[rank])
    for rank in largest_first[: batch - sum(scaled)]:
        scaled[rank] += 1
    return tuple(scaled)


def parse_shares(text: str) -> Wanted:
    """One of WORDS is empty, else `<node>=<part>` or `<node>:<local rank>=<part>`, with commas.

    Raises ValueError.
    """
    if text in WORDS:
        return {}
    wanted: dict[tuple[str, int | None], int] = {}
    for item in text.split(","):
        name, equals, part = item.partition("=")
        node, colon, local_rank = name.strip().partition(":")
        if not (node and equals and part.isdecimal() and (local_rank.isdecimal() or not colon) and len(part) < 10):
            raise ValueError(
                f"{item!r}: expected profiled, equal, measured, auto, or parts like v100=5,a2000=2 or a16:0=1,a16:1=3"
            )
        key = (node, int(local_rank) if colon else None)
        if key in wanted:
            raise ValueError(f"{name.strip()} is given twice")
        wanted[key] = int(part)
    if not any(wanted.values()):
        raise ValueError("all parts are 0: one rank at least has to take samples")
    return wanted


def choose_shares(wanted: Wanted, ranks: Sequence[tuple[str, int]], batch: int) -> tuple[int, ...]:
    """Whole samples for each rank, equal or in the wanted proportion. A rank's own word goes before its node's.

    ranks: (node, local rank) of each. Raises ValueError where a rank is not spoken of, or a name is no rank's.
    """
    if not wanted:
        return equal_shares(batch, len(ranks))
    known = {key for node, local_rank in ranks for key in ((node, local_rank), (node, None))}
    for node, local_rank in wanted:
        if (node, local_rank) not in known:
            raise ValueError(
                f"{node if local_rank is None else f'{node}:{local_rank}'} takes no part; "
                f"there are {', '.join(f'{n}:{r}' for n, r in ranks)}"
            )
    parts = []
    for node, local_rank in ranks:
        part = wanted.get((node, local_rank), wanted.get((node, None)))
        if part is None:
            raise ValueError(f"nothing is said of {node}:{local_rank}; give every rank its part, 0 takes it out")
        parts.append(part)
    if not any(parts):
        raise ValueError("all parts are 0: one rank at least has to take samples")
    return scale_shares(parts, batch)


@dataclass(frozen=True)
class Speed:
    """How long a rank computes on m samples: t = a + b*m, the model of AdaptDL (Qiao et al., OSDI 2021)."""

    fixed_ms: float
    """a: of each micro-batch, whatever its size."""
    sample_ms: float
    """b: of each sample."""
    cap: int | None = None
    """The most samples that fit in its memory at once; more are done one such micro-batch after the other, and each
    costs fixed_ms. None: no limit is known.
    """

    def step_ms(self, samples: int) -> float:
        """0 for no samples: such a rank computes nothing."""
        return self.micro_batches(samples) * self.fixed_ms + samples * self.sample_ms

    def micro_batches(self, samples: int) -> int:
        return -(-samples // self.cap) if self.cap else min(samples, 1)


Speeds = Mapping[tuple[str, int], Speed]
"""What is known of each (node, local rank)."""


def at_most(speed: Speed, samples: int) -> Speed:
    """With no more samples at once, whatever memory would hold; 0 is no limit."""
    if not samples or (speed.cap is not None and speed.cap <= samples):
        return speed
    return dataclasses.replace(speed, cap=samples)


def parse_speeds(text: str) -> dict[tuple[str, int], Speed]:
    """`<node>:<local rank>=<fixed ms>+<ms a sample>`, where a limit is known with `/<most samples>`, with commas.

    Raises ValueError.
    """
    speeds = {}
    for item in filter(None, text.split(",")):
        name, _, speed = item.partition("=")
        node, _, local_rank = name.strip().rpartition(":")
        fixed, _, rest = speed.partition("+")
        sample, slash, cap = rest.partition("/")
        try:
            parsed = Speed(float(fixed), float(sample), int(cap) if slash else None)
            key = (node, int(local_rank))
        except ValueError:
            raise ValueError(
                f"{item!r}: expected fixed ms + ms a sample / most samples, like v100:0=2+1.2/512"
            ) from None
        if not node or key in speeds or not (0 <= parsed.fixed_ms < 1e9 and 0 < parsed.sample_ms < 1e9):
            raise ValueError(f"{item!r}: a rank once, its fixed ms at least 0, its ms a sample more than 0")
        if parsed.cap is not None and parsed.cap < 1:
            raise ValueError(f"{item!r}: no sample fits; leave the rank out")
        speeds[key] = parsed
    return speeds


def format_speeds(speeds: Speeds) -> str:
    """What `parse_speeds` reads, to six digits."""
    return ",".join(
        f"{node}:{local_rank}={speed.fixed_ms:.6g}+{speed.sample_ms:.6g}{'' if speed.cap is None else f'/{speed.cap}'}"
        for (node, local_rank), speed in speeds.items()
    )


def split_batch(text: str, speeds: Speeds, ranks: Sequence[tuple[str, int]], batch: int) -> tuple[int, ...]:
    """Whole samples for each rank as the setting `shares` has it; `auto` begins equal where a speed is not known, and
    `profiled` stays so.

    ranks: (node, local rank) of each. Raises ValueError where it does not fit the ranks, or a speed is missing.
    """
    if text not in (PROFILED, *BY_SPEED):
        return choose_shares(parse_shares(text), ranks, batch)
    unknown = [f"{node}:{local_rank}" for node, local_rank in ranks if (node, local_rank) not in speeds]
    if not unknown:
        return without_singles(fastest_shares([speeds[rank] for rank in ranks], batch))
    if text in ("auto", PROFILED):
        return equal_shares(batch, len(ranks))
    raise ValueError(f"the speed of {', '.join(unknown)} has not been measured; shares=auto finds it out as it goes")


def without_singles(shares: Sequence[int]) -> tuple[int, ...]:
    """No rank has a single sample, unless that is the whole batch: BatchNorm can make nothing of one value.

    Two singles become a pair, of the lower rank; one that is left over goes to the rank with the most, the lowest such,
    which it delays least. A rank with 0 stays without.
    """
    left = list(shares)
    singles = [rank for rank, share in enumerate(left) if share == 1]
    for taker, giver in zip(singles[::2], singles[1::2], strict=False):
        left[taker], left[giver] = 2, 0
    most = max(range(len(left)), key=left.__getitem__, default=0)
    if len(singles) % 2 and left[most] > 1:
        left[singles[-1]] = 0
        left[most] += 1
    return tuple(left)


def with_samples(shares: Sequence[int], ranks: Sequence[int], samples: int) -> tuple[int, ...]:
    """These ranks, which have none, are given so many each by whoever has most, as long as that one keeps as many."""
    left = list(shares)
    for rank in ranks:
        most = max(range(len(left)), key=left.__getitem__)
        if left[most] < 2 * samples:
            break
        left[most] -= samples
        left[rank] += samples
    return tuple(left)


def fastest_shares(speeds: Sequence[Speed], batch: int) -> tuple[int, ...]:
    """`batch` samples over the ranks so that the slowest is done as early as whole samples allow; a tie goes to the
    lower rank. A rank that would only make the step longer gets 0. Raises ValueError where no rank can take any.

    A rank's time never falls as its samples grow. So giving each further sample to the rank that is done first with it
    is optimal: the last one given sets the time, and had any other split been faster, this sample would have had a
    better place. All but the last few are given at once, by bisecting the time.
    """
    able = [speed.cap != 0 for speed in speeds]
    if batch > 0 and not any(able):
        raise ValueError("no rank has memory for a single sample")
    if any(not 0 <= speed.fixed_ms < math.inf or not 0 < speed.sample_ms < math.inf for speed in speeds):
        raise ValueError("a rank's fixed_ms is at least 0 and its sample_ms more than 0")
    shares = _surely(speeds, able, batch)
    waiting = [(speed.step_ms(shares[rank] + 1), rank) for rank, speed in enumerate(speeds) if able[rank]]
    heapq.heapify(waiting)
    for _ in range(batch - sum(shares)):
        _, rank = waiting[0]
        shares[rank] += 1
        heapq.heapreplace(waiting, (speeds[rank].step_ms(shares[rank] + 1), rank))
    return tuple(shares)


def _surely(speeds: Sequence[Speed], able: Sequence[bool], batch: int) -> list[int]:
    """What all ranks manage within the longest time in which they do not manage the whole batch."""
    low_ms, high_ms = 0.0, max((s.step_ms(batch) for s, can in zip(speeds, able, strict=True) if can), default=0.0)
    shares = [0] * len(speeds)
    while high_ms - low_ms > min(speed.sample_ms for speed in speeds) / 4:
        middle_ms = (low_ms + high_ms) / 2
        if middle_ms in (low_ms, high_ms):  # no float lies between them: a sample is less than their spacing
            break
        done = [_within(s, middle_ms, batch) if can else 0 for s, can in zip(speeds, able, strict=True)]
        if sum(done) < batch:
            low_ms, shares = middle_ms, done
        else:
            high_ms = middle_ms
    return shares


def _within(speed: Speed, time_ms: float, most: int) -> int:
    """The most samples that the rank does in this time: whole micro-batches, and what is left for one more; rounding
    may make that one sample too many or too few.
    """
    cap = speed.cap or max(1, most)
    full, left_ms = divmod(time_ms, speed.fixed_ms + cap * speed.sample_ms)
    more = max(0, int(min((left_ms - speed.fixed_ms) / speed.sample_ms, most)))
    samples = min(int(full) * cap + more, most) if full < most else most
    while samples < most and speed.step_ms(samples + 1) <= time_ms:
        samples += 1
    while samples and speed.step_ms(samples) > time_ms:
        samples -= 1
    return samples
