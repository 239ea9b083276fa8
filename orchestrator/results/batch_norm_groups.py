"""Which samples BatchNorm saw together in a run, from the ranks' `start` events.

    read_batch_norm(starts, plan, rebalances)       BatchNorm(groups=((183, 1), (73, 1)), whole=False)
    found.words                                     "BatchNorm saw groups of 183 and 73"

It takes its means over what a rank computes at once: its part of the batch, or one micro-batch of it. So an exact
update is that of one process that adds up the gradients of these groups; only with sync_bn, or with a single group, is
it that of one process that sees the whole batch.
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
"""Sizes of groups that are named one by one."""
MOST_KINDS = 1000
"""The most kinds that are read of one rank."""


class BatchNorm(Record):
    """BatchNorm in an update with a full batch, as the run began."""

    groups: tuple[tuple[int, int], ...]
    """(samples, how many groups of so many), the largest first."""
    is_synchronised: bool = False
    moved_to: tuple[int, ...] = ()
    """By rank, the parts of the batch that shares=auto came to in the end; empty where it left them."""
    under_ddp: tuple[int, ...] = ()
    """Of a pipeline, whose groups are micro-batches: each rank's part of the batch, were the batch cut in place of the
    network."""

    @property
    def is_whole(self) -> bool:
        """Whether it saw every sample of an update at once, from the first update to the last."""
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
        """What an exact update is the same as."""
        if self.is_whole:
            return "the update of one process with the whole batch"
        if self.under_ddp:
            return "the update of one process that adds up the gradients of these micro-batches"
        return "the update of one process that adds up the gradients of these groups; sync_bn=true sees the whole batch"


def read_batch_norm(
    starts: Mapping[int, Mapping[str, Any]], plan: LaunchPlan, rebalances: Sequence[Rebalance]
) -> BatchNorm | None:
    """starts: each rank's last `start`. None where the network has no BatchNorm, or a rank does not report it."""
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
    """Each micro-batch passes every stage, and a stage may hold no BatchNorm: the one that saw most has seen all."""
    stages: dict[int, Counter[int]] = {}
    for rank, place in places.items():
        stages.setdefault(place.stage, Counter()).update(_groups(starts.get(rank, {})) or {})
    groups = max(stages.values(), key=lambda groups: groups.total())
    batch = plan.recorded.batch
    if not groups or batch is None:
        return None
    return BatchNorm(groups=tuple(sorted(groups.items(), reverse=True)), under_ddp=_parts(plan, batch))


def _parts(plan: LaunchPlan, batch: int) -> tuple[int, ...]:
    """By rank, in proportion to the hosts' speeds alone where the plan knows all of them, else alike."""
    speeds = [node.solo_samples_per_s or 0.0 for node in plan.nodes]
    known = all(speed > 1 for speed in speeds)
    wanted = [
        round(1000 * speed / node.ranks) if known else 1
        for node, speed in zip(plan.nodes, speeds, strict=True)
        for _ in node.rank_numbers
    ]
    return tuple(scale_shares(wanted, batch))


def _groups(start: Mapping[str, Any]) -> Counter[int] | None:
    """How many groups of each size a rank reports; a rank without samples has none."""
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
    """`183 and 73`, `4 x 64, 61 and 3`; of many sizes the largest and the smallest."""
    pairs = sorted(groups, reverse=True)
    if len(pairs) > NAMED:
        return f"{pairs[0][0]} down to {pairs[-1][0]}, {sum(times for _, times in pairs)} in all"
    words = [f"{times} x {size}" if times > 2 else " and ".join([str(size)] * times) for size, times in pairs]
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


# How a run's batch was split over its ranks in the course of it, from the ranks' `rebalance` events.
#
# read_rebalances(events, plan)       (Rebalance(step=7, shares=(45, 19), before=(32, 32), spread=0.83), ...)

MOST = 200
"""The most rebalances of one run that are read and shown."""

Share = Annotated[int, Field(ge=0, lt=1 << 40)]


class Rebalance(Record):
    """From `step` (counted from 0 over the whole run) on, each rank took so many samples of a full batch."""

    step: Annotated[int, Field(ge=0, lt=1 << 60)]
    shares: tuple[Share, ...]
    before: tuple[Share, ...]
    spread: Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
    """The spread of the ranks' compute times before: (max - min) / mean."""


def read_rebalances(events: Events, plan: LaunchPlan) -> tuple[Rebalance, ...]:
    """All ranks report the same: the first one that reports any counts. Impossible records are left out."""
    for node in plan.nodes:
        for rank in node.rank_numbers:
            read = [_read(event, plan.world_size) for event in events.of_rank(rank, "rebalance", MOST)]
            if rebalances := tuple(one for one in read if one):
                return rebalances
    return ()


def _read(event: dict[str, object], world_size: int) -> Rebalance | None:
    try:
        found = Rebalance.model_validate(event)
    except ValidationError:
        return None
    return found if len(found.shares) == len(found.before) == world_size and any(found.shares) else None
