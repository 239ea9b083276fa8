"""The table of `orch profile`: how fast each rank is alone, and its part of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.planning.measurement import BlockTimes
from orchestrator.planning.profiles import RankProfile, measured_shares
from orchestrator.units import counted
from orchestrator.views import console, tables
from orchestrator.views.figures import UNKNOWN, figure


def print_profiles(batch: int, known: Sequence[RankProfile]) -> None:
    shares = measured_shares(batch, known)
    tables.print_table(titles(batch), [cells(batch, each, shares.get(each.rank)) for each in known], right_from=2)
    if words := blocks_words([each.profile.blocks for each in known if each.profile.blocks]):
        console.put(words)


def titles(batch: int) -> tuple[str, ...]:
    return ("host", "GPU", "fixed ms", "ms/sample", "samples/s", "most at once", f"share of {batch}", "measured")


def cells(batch: int, each: RankProfile, share: int | None) -> tuple[str, ...]:
    """A line of the table. share: the rank's part of the batch, if it is known."""
    (node, local_rank), known = each.rank, each.profile
    return (
        node if known.ranks == 1 else f"{node}:{local_rank}",
        known.gpu or known.device_name,
        figure(known.fixed_ms),
        figure(known.sample_ms),
        figure(known.samples_per_s(batch)),
        str(known.cap) if known.cap else f"> {known.largest}",
        UNKNOWN if share is None else str(share),
        ("now" if each.fresh else known.created[:16].replace("T", " ")) + f" on {known.node}",
    )


def blocks_words(known: Sequence[BlockTimes]) -> str:
    """What is known of the network's blocks, "" where no rank measured them."""
    if not known:
        return ""
    stretches = min(blocks.stretches for blocks in known)
    in_groups = f" in {counted(stretches, 'group')}" if stretches < known[0].count else ""
    least, most = (figure(of(blocks.fixed_ms for blocks in known)) for of in (min, max))
    fixed = least if least == most else f"{least} to {most}"
    return f"blocks: {known[0].count} measured{in_groups}, fixed {fixed} ms a micro-batch"
