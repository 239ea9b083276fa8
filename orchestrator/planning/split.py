"""How a global batch is divided over a job's ranks, by the setting `shares` and what is known of their speeds. Pure.

    split = split_batch_of(settings, placement.ranks, profiles)
    split.shares["v100", 0], split.policy           46, "measured"
    split.settings                                  what the ranks receive: {"shares": "v100:0=46,...", "speeds": ...}

The controller divides the batch once, here; the ranks do it once more, by the settings that they receive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from orchestrator.errors import UsageError
from orchestrator.planning.profiles import RETRY, Profile, Profiles, Rank, profile_line
from trainer.shared.settings import Settings
from trainer.shared.shares import (
    BY_SPEED,
    PROFILED,
    Speed,
    at_most,
    equal_shares,
    format_speeds,
    parse_speeds,
    split_batch,
)
from trainer.shared.strategy_table import ONE_PROCESS

FEW_NAMES = 8
"""The samples of more hosts than this are not listed in a note."""


@dataclass(frozen=True)
class Split:
    """A global batch, divided."""

    shares: Mapping[Rank, int] = field(default_factory=dict)
    """Samples of each rank; empty for a script whose batch is not known."""
    policy: str = ""
    """The setting `shares`, settled; "" where it stays as it is."""
    speeds: Mapping[Rank, Speed] = field(default_factory=dict)
    """What is known of ranks, by hand or by profiles."""
    alone: Mapping[Rank, float] = field(default_factory=dict)
    """samples/s of each rank by itself with the whole batch, by its profile."""
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, str]:
        """The settings from which the ranks compute the same shares."""
        settings = {}
        if self.policy == "measured":
            settings["shares"] = ",".join(f"{node}:{i}={share}" for (node, i), share in self.shares.items())
        if self.speeds:  # a person's own are among them, which may name some ranks alone
            settings["speeds"] = format_speeds(self.speeds)
        return settings


def split_equally(batch: int | None, ranks: Sequence[Rank]) -> Split:
    """batch: None where it is not known."""
    return Split(dict(zip(ranks, equal_shares(batch, len(ranks)), strict=True))) if batch else Split()


def split_batch_of(
    settings: Settings, ranks: Sequence[Rank], profiles: Profiles, not_kept: Profiles | None = None
) -> Split:
    """ranks: in the order of their global ranks. not_kept: profiles that count for nothing, to say so where one is
    missed.

    Raises UsageError where the setting `shares` does not fit the ranks, or asks for a profile that is not there.
    """
    if settings.profile_s:
        return split_equally(settings.batch, ranks)
    known = {**{rank: profile.speed for rank, profile in profiles.items()}, **parse_speeds(settings.speeds)}
    speeds = {rank: at_most(speed, settings.local_batch) for rank, speed in known.items()}
    policy = _policy(settings, all_known=all(rank in speeds for rank in ranks))
    try:
        shares = split_batch(policy, speeds, ranks, settings.batch)
    except ValueError as error:
        missed = [not_kept[rank] for rank in ranks if rank in not_kept and rank not in known] if not_kept else []
        if policy == "measured" and missed:
            raise _not_kept(profile_line(settings), missed) from error
        raise UsageError(f"shares: {error}", _remedy(profile_line(settings), policy)) from error
    split = dict(zip(ranks, shares, strict=True))
    by_itself = settings.shares == PROFILED and shares != equal_shares(settings.batch, len(ranks))
    return Split(
        shares=split,
        policy=policy,
        speeds=speeds,
        alone={rank: profiles[rank].samples_per_s(settings.batch) for rank in ranks if rank in profiles},
        notes=(*([_by_profile_words(split)] if by_itself else ()), *_notes(policy, split, speeds, profiles)),
    )


def _policy(settings: Settings, *, all_known: bool) -> str:
    """The setting `shares` as it will be where the person leaves it to us."""
    if settings.shares != PROFILED:
        return settings.shares
    return "measured" if all_known and settings.strategy not in ONE_PROCESS else "equal"


# ---- in words -------------------------------------------------------------------------------------------------------


def _by_profile_words(split: Mapping[Rank, int]) -> str:
    samples: dict[str, int] = {}
    for (name, _), share in split.items():
        samples[name] = samples.get(name, 0) + share
    few = f" ({', '.join(f'{name} {share}' for name, share in samples.items())})" if len(samples) <= FEW_NAMES else ""
    return f"shares=measured{few}, since every rank's speed is known; --set shares=equal splits the batch evenly"


def _not_kept(profile: str, missed: Sequence[Profile]) -> UsageError:
    words = {
        f"{each.node} was measured on {each.created[:10]}, but not kept: {each.why_not_valid()}" for each in missed
    }
    return UsageError(f"shares: {'; '.join(sorted(words))}", f"{RETRY.format(profile=profile)}; or --set shares=auto")


def _remedy(profile: str, policy: str) -> str:
    if policy in BY_SPEED:
        return f"measure it: `{profile}`, with the same --set"
    return "name every node, or rank, that takes part"


def _notes(policy: str, split: Mapping[Rank, int], speeds: Mapping[Rank, Speed], profiles: Profiles) -> Iterator[str]:
    if policy not in BY_SPEED:
        return iter(())
    if not speeds.keys() >= split.keys():
        words = "shares=auto: not every rank's speed is known, so they begin equal (`orch profile` measures)"
        return iter((words,))
    return chain(_idle_words(split, speeds), _extrapolated_words(split, profiles))


def _idle_words(split: Mapping[Rank, int], speeds: Mapping[Rank, Speed]) -> Iterator[str]:
    longest_ms = max(speeds[rank].step_ms(share) for rank, share in split.items())
    for (node, i), share in split.items():
        if share == 0:
            yield (
                f"{node}:{i} is left out (share 0): two samples would take it {speeds[node, i].step_ms(2):.0f} ms, "
                f"and without it the whole batch is computed in {longest_ms:.0f} ms"
            )


def _extrapolated_words(split: Mapping[Rank, int], profiles: Profiles) -> Iterator[str]:
    beyond = sorted(
        f"{node}:{i} (beyond {profiles[node, i].largest})"
        for (node, i), share in split.items()
        if (node, i) in profiles and profiles[node, i].is_extrapolated(share)
    )
    if beyond:
        yield f"extrapolated, since their shares are larger than what the profile tried: {', '.join(beyond)}"
