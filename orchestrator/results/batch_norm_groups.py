"""The samples that BatchNorm normalised together, from the ranks' `start` events.

    read_batch_norm(starts, plan, rebalances).words         "BatchNorm saw groups of 183 and 73"

A group is a rank's part of the batch, or a micro-batch. An exact update equals that of one process that adds up the
gradients of these groups; only with sync_bn or a single group, that of one process with the whole batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationError

from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.record import Record
from orchestrator.results.events import Events
from orchestrator.results.timeline import Place, read_places
from trainer.shared.shares import scale_shares

NAMED = 6
MOST_KINDS = 1000


class BatchNorm(Record):
    """For a full batch, at the beginning of the run."""

    groups: tuple[tuple[int, int], ...]
    """(samples, number of such groups), largest first."""
    is_synchronised: bool = False
    moved_to: tuple[int, ...] = ()
    """By rank, the final parts with shares=auto; empty if unchanged."""
    under_ddp: tuple[int, ...] = ()
    """In a pipeline: the ranks' parts of the batch with ddp instead."""

    @property
    def is_whole(self) -> bool:
        return self.is_synchronised or (sum(times for _, times in self.groups) == 1 and not self.moved_to)

    @property
    def words(self) -> str:
        if self.is_whole:
            return f"BatchNorm saw the whole batch of {self.groups[0][0]} at once"
        moved = ""
        if self.moved_to:
            parts = _list(Counter(part for part in self.moved_to if part).items())
            moved = (
                f"; shares=auto changed them in mid-run, in the end to parts of {parts}, cut smaller where memory asks"
            )
        if self.under_ddp:
            beside = _list(Counter(part for part in self.under_ddp if part).items())
            return f"BatchNorm saw micro-batches of {_list(self.groups)} (with ddp: groups of {beside})"
        return f"BatchNorm saw groups of {_list(self.groups)}{moved}"

    @property
    def exact_words(self) -> str:
        if self.is_whole:
            return "the update of one process with the whole batch"
        if self.under_ddp:
            return "the update of one process that adds up the gradients of these micro-batches"
        return "the update of one process that adds up the gradients of these groups; sync_bn=true sees the whole batch"


def read_batch_norm(
    starts: Mapping[int, Mapping[str, Any]], plan: LaunchPlan, rebalances: Sequence[Rebalance]
) -> BatchNorm | None:
    """None without BatchNorm, or if a rank does not report it."""
    if places := read_places(plan, starts):
        return _of_micro_batches(starts, plan, places)
    reported = [_groups(starts.get(rank, {})) for node in plan.nodes for rank in node.rank_numbers]
    known = [groups for groups in reported if groups is not None]
    if not known or len(known) < len(reported):
        return None
    if plan.recorded.sync_bn:
        return BatchNorm(groups=tuple(known[0].items())[:1], is_synchronised=True) if known[0] else None
    total = sum(known, Counter[int]())
    moved = rebalances[-1].shares if rebalances else ()
    return BatchNorm(groups=tuple(sorted(total.items(), reverse=True)), moved_to=moved) if total else None


def _of_micro_batches(
    starts: Mapping[int, Mapping[str, Any]], plan: LaunchPlan, places: Mapping[int, Place]
) -> BatchNorm | None:
    # A stage may have no BatchNorm; the stage with the most groups saw all micro-batches.
    stages: dict[int, Counter[int]] = {}
    for rank, place in places.items():
        stages.setdefault(place.stage, Counter()).update(_groups(starts.get(rank, {})) or {})
    groups = max(stages.values(), key=lambda groups: groups.total())
    batch = plan.recorded.batch
    if not groups or batch is None:
        return None
    return BatchNorm(groups=tuple(sorted(groups.items(), reverse=True)), under_ddp=_parts(plan, batch))


def _parts(plan: LaunchPlan, batch: int) -> tuple[int, ...]:
    """In proportion to the hosts' own speeds if all are known, else equal."""
    speeds = [node.solo_samples_per_s or 0.0 for node in plan.nodes]
    known = all(speed > 1 for speed in speeds)
    wanted = [
        round(1000 * speed / node.ranks) if known else 1
        for node, speed in zip(plan.nodes, speeds, strict=True)
        for _ in node.rank_numbers
    ]
    return tuple(scale_shares(wanted, batch))


def _groups(start: Mapping[str, Any]) -> Counter[int] | None:
    """Number of groups by size."""
    rows = start.get("batch_norm_groups")
    if not isinstance(rows, list) or len(rows) > MOST_KINDS:
        return None
    found = Counter[int]()
    for pair in rows:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and 0 < n < 1 << 40 for n in pair)):
            return None
        found[pair[0]] += pair[1]
    return found


def _list(groups: Any) -> str:
    """`183 and 73`, `4 x 64, 61 and 3`."""
    pairs = sorted(groups, reverse=True)
    if len(pairs) > NAMED:
        return f"{pairs[0][0]} down to {pairs[-1][0]}, {sum(times for _, times in pairs)} in all"
    words = [f"{times} x {size}" if times > 2 else " and ".join([str(size)] * times) for size, times in pairs]
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


# Changes of the split of the batch over the ranks, from their `rebalance` events.

MOST = 200

Share = Annotated[int, Field(ge=0, lt=1 << 40)]


class Rebalance(Record):
    """From `step` (counted from 0) on: each rank's samples of a full batch."""

    step: Annotated[int, Field(ge=0, lt=1 << 60)]
    shares: tuple[Share, ...]
    before: tuple[Share, ...]
    spread: Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
    """The ranks' compute times before: (max - min) / mean."""


def read_rebalances(events: Events, plan: LaunchPlan) -> tuple[Rebalance, ...]:
    """From the first rank with any, since all report the same."""
    for node in plan.nodes:
        for rank in node.rank_numbers:
            read = [_read(event, plan.world_size) for event in events.of_rank(rank, "rebalance", MOST)]
            if rebalances := tuple(found for found in read if found):
                return rebalances
    return ()


def _read(event: dict[str, object], world_size: int) -> Rebalance | None:
    try:
        found = Rebalance.model_validate(event)
    except ValidationError:
        return None
    return found if len(found.shares) == len(found.before) == world_size and any(found.shares) else None
