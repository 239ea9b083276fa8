"""Splits a batch over ranks in whole samples: equally, in given proportions, or by speed. Imports no torch.

>>> wanted, ranks = parse_shares("v100=5,a2000=2"), (("v100", 0), ("a2000", 0))
>>> choose_shares(wanted, ranks, batch=64)
(46, 18)
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
"""Part by (node, local rank), or by (node, None) for all its ranks."""

PROBED = 2
"""Samples given now and then to a rank without a share, to measure it: the fewest that BatchNorm can use."""
BY_SPEED = ("measured", "auto")
"""Policies by speed: measured before the run, or during it."""
PROFILED = "profiled"
"""The default: measured if all speeds are known, otherwise equal."""
WORDS = (PROFILED, "equal", *BY_SPEED)


def equal_shares(batch: int, world_size: int) -> tuple[int, ...]:
    """Shares differ by at most one; the first ranks take the rest."""
    whole, rest = divmod(batch, world_size)
    return tuple(whole + (rank < rest) for rank in range(world_size))


def micro_batch_sizes(share: int, count: int, smaller_first: float = 0.0) -> tuple[int, ...]:
    """At most three sizes: all but the first differ by at most one. smaller_first: the part, 0..1, by which the first
    is smaller; it keeps the two samples that BatchNorm needs, if the others have them.

    >>> micro_batch_sizes(64, 4), micro_batch_sizes(64, 4, smaller_first=0.3)
    ((16, 16, 16, 16), (12, 18, 17, 17))
    """
    if count < 2 or not smaller_first:
        return equal_shares(share, count)
    part = 1 - smaller_first
    first = min(share // count, max(2, round(share * part / (count - 1 + part))))
    return (first, *equal_shares(share - first, count - 1))


def scale_shares(shares: Sequence[int], batch: int) -> tuple[int, ...]:
    """In the proportion of `shares` (sum at least 1), by the largest remainder; ties go to the lower rank."""
    total = sum(shares)
    if total == batch:  # every batch except an epoch's last
        return tuple(shares)
    scaled = [share * batch // total for share in shares]
    remainder = [share * batch % total for share in shares]
    largest_first = sorted(range(len(shares)), key=lambda rank: -remainder[rank])
    for rank in largest_first[: batch - sum(scaled)]:
        scaled[rank] += 1
    return tuple(scaled)


def parse_shares(text: str) -> Wanted:
    """`<node>=<part>` or `<node>:<local rank>=<part>`, with commas; {} for one of WORDS. Raises ValueError."""
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
        raise ValueError("all parts are 0: at least one rank must take samples")
    return wanted


def choose_shares(wanted: Wanted, ranks: Sequence[tuple[str, int]], batch: int) -> tuple[int, ...]:
    """In the wanted proportion, or equal. A rank's part precedes its node's.

    ranks: (node, local rank). Raises ValueError if a rank or a name is unknown.
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
            raise ValueError(f"no part is given for {node}:{local_rank}; give every rank a part, 0 takes it out")
        parts.append(part)
    if not any(parts):
        raise ValueError("all parts are 0: at least one rank must take samples")
    return scale_shares(parts, batch)


@dataclass(frozen=True)
class Speed:
    """Time of m samples: t = a + b*m, the model of AdaptDL (Qiao et al., OSDI 2021)."""

    fixed_ms: float
    """a: per micro-batch."""
    sample_ms: float
    """b: per sample."""
    cap: int | None = None
    """Largest micro-batch that memory holds; None if unknown."""

    def step_ms(self, samples: int) -> float:
        """0 without samples."""
        return self.micro_batches(samples) * self.fixed_ms + samples * self.sample_ms

    def micro_batches(self, samples: int) -> int:
        return -(-samples // self.cap) if self.cap else min(samples, 1)


Speeds = Mapping[tuple[str, int], Speed]
"""By (node, local rank)."""


def at_most(speed: Speed, samples: int) -> Speed:
    """With a micro-batch of at most `samples`; 0 is no limit."""
    if not samples or (speed.cap is not None and speed.cap <= samples):
        return speed
    return dataclasses.replace(speed, cap=samples)


def parse_speeds(text: str) -> dict[tuple[str, int], Speed]:
    """`<node>:<local rank>=<fixed ms>+<ms per sample>[/<most samples>]`, with commas. Raises ValueError."""
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
                f"{item!r}: expected fixed ms + ms per sample / most samples, like v100:0=2+1.2/512"
            ) from None
        if not node or key in speeds or not (0 <= parsed.fixed_ms < 1e9 and 0 < parsed.sample_ms < 1e9):
            raise ValueError(f"{item!r}: expected each rank once, fixed ms of at least 0, ms per sample above 0")
        if parsed.cap is not None and parsed.cap < 1:
            raise ValueError(f"{item!r}: no sample fits; leave the rank out")
        speeds[key] = parsed
    return speeds


def format_speeds(speeds: Speeds) -> str:
    """The inverse of `parse_speeds`, to six digits."""
    return ",".join(
        f"{node}:{local_rank}={speed.fixed_ms:.6g}+{speed.sample_ms:.6g}{'' if speed.cap is None else f'/{speed.cap}'}"
        for (node, local_rank), speed in speeds.items()
    )


def split_batch(text: str, speeds: Speeds, ranks: Sequence[tuple[str, int]], batch: int) -> tuple[int, ...]:
    """The split for the setting `shares`. Equal for `auto` and `profiled` if a speed is unknown.

    ranks: (node, local rank). Raises ValueError if the setting does not fit the ranks, or a speed is missing.
    """
    if text not in (PROFILED, *BY_SPEED):
        return choose_shares(parse_shares(text), ranks, batch)
    unknown = [f"{node}:{local_rank}" for node, local_rank in ranks if (node, local_rank) not in speeds]
    if not unknown:
        return without_singles(fastest_shares([speeds[rank] for rank in ranks], batch))
    if text in ("auto", PROFILED):
        return equal_shares(batch, len(ranks))
    raise ValueError(f"the speed of {', '.join(unknown)} has not been measured; shares=auto measures it during the run")


def without_singles(shares: Sequence[int]) -> tuple[int, ...]:
    """No rank keeps a single sample, which BatchNorm cannot use, unless it is the whole batch."""
    # Two singles become a pair of the lower rank. A single that is left over goes to the rank with most samples, which
    # it delays least.
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
    """These ranks take `samples` each from the largest share, if that rank keeps as many."""
    left = list(shares)
    for rank in ranks:
        most = max(range(len(left)), key=left.__getitem__)
        if left[most] < 2 * samples:
            break
        left[most] -= samples
        left[rank] += samples
    return tuple(left)


def fastest_shares(speeds: Sequence[Speed], batch: int) -> tuple[int, ...]:
    """Makes the slowest rank finish as early as possible; ties go to the lower rank. A rank may get 0.

    Raises ValueError if no rank can take a sample.
    """
    # A rank's time never falls as its samples grow. So giving each further sample to the rank that finishes it first is
    # optimal: the last one sets the time, and any faster split would have had a better place for it. Bisection of the
    # time gives most samples at once.
    able = [speed.cap != 0 for speed in speeds]
    if batch > 0 and not any(able):
        raise ValueError("no rank has memory for a single sample")
    if any(not 0 <= speed.fixed_ms < math.inf or not 0 < speed.sample_ms < math.inf for speed in speeds):
        raise ValueError("a rank's fixed_ms must be at least 0 and its sample_ms above 0")
    shares = _surely(speeds, able, batch)
    waiting = [(speed.step_ms(shares[rank] + 1), rank) for rank, speed in enumerate(speeds) if able[rank]]
    heapq.heapify(waiting)
    for _ in range(batch - sum(shares)):
        _, rank = waiting[0]
        shares[rank] += 1
        heapq.heapreplace(waiting, (speeds[rank].step_ms(shares[rank] + 1), rank))
    return tuple(shares)


def _surely(speeds: Sequence[Speed], able: Sequence[bool], batch: int) -> list[int]:
    """A lower bound of every share in an optimal split."""
    low_ms, high_ms = 0.0, max((s.step_ms(batch) for s, can in zip(speeds, able, strict=True) if can), default=0.0)
    shares = [0] * len(speeds)
    while high_ms - low_ms > min(speed.sample_ms for speed in speeds) / 4:
        middle_ms = (low_ms + high_ms) / 2
        if middle_ms in (low_ms, high_ms):  # a sample takes less than the spacing of floats
            break
        done = [_within(s, middle_ms, batch) if can else 0 for s, can in zip(speeds, able, strict=True)]
        if sum(done) < batch:
            low_ms, shares = middle_ms, done
        else:
            high_ms = middle_ms
    return shares


def _within(speed: Speed, time_ms: float, most: int) -> int:
    """The most samples in this time."""
    # Whole micro-batches and a last partial one; the loops correct rounding.
    cap = speed.cap or max(1, most)
    full, left_ms = divmod(time_ms, speed.fixed_ms + cap * speed.sample_ms)
    more = max(0, int(min((left_ms - speed.fixed_ms) / speed.sample_ms, most)))
    samples = min(int(full) * cap + more, most) if full < most else most
    while samples < most and speed.step_ms(samples + 1) <= time_ms:
        samples += 1
    while samples and speed.step_ms(samples) > time_ms:
        samples -= 1
    return samples
